// SPDX-License-Identifier: Apache-2.0
// Inputs for benchmarks.
#pragma once

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::cli {

// Returns random f32 or bf16 values in −1 … 1.
Tensor random_rows(const Shape& shape, Dtype dtype, std::uint64_t seed);

}  // namespace switchyard::cli
