// SPDX-License-Identifier: Apache-2.0
// Embedding lookup, and the gradient of the table.
#pragma once

#include <cstdint>
#include <span>

#include "model/compute.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// y[t] = table[tokens[t]], with table [V, H] and y [T, H].
void embed(Compute& compute, const ConstTensorView& table, std::span<const std::uint8_t> tokens,
           const TensorView& y);

// d_table[v] += Σ of d_y[t] over all t with tokens[t] = v, in order.
void embed_backward(Compute& compute, std::span<const std::uint8_t> tokens,
                    const ConstTensorView& d_y, const TensorView& d_table);

}  // namespace switchyard::train
