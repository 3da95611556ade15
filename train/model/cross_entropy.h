// The loss of next-byte prediction and its gradient.
#pragma once

#include <cstdint>
#include <span>

#include "model/compute.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// Σ over rows of −log softmax(logits)[target], in double: logits [T, V]; targets [T].
double cross_entropy(Compute& compute, const ConstTensorView& logits,
                     std::span<const std::uint8_t> targets);

// The same, and logits become the gradient of scale · that sum.
double cross_entropy_with_gradient(Compute& compute, const TensorView& logits,
                                   std::span<const std::uint8_t> targets, float scale);

}  // namespace switchyard::train
