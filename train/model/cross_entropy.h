// SPDX-License-Identifier: Apache-2.0
// The loss of next-byte prediction and its gradient.
#pragma once

#include <cstdint>
#include <span>

#include "model/compute.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// Returns Σ over rows of −log softmax(logits)[target], added in double. logits is [T, V], targets
// [T].
double cross_entropy(Compute& compute, const ConstTensorView& logits,
                     std::span<const std::uint8_t> targets);

// Returns the same sum, and replaces logits by the gradient of scale · sum.
double cross_entropy_with_gradient(Compute& compute, const TensorView& logits,
                                   std::span<const std::uint8_t> targets, float scale);

}  // namespace switchyard::train
