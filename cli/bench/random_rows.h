// Inputs for benchmarks.
#pragma once

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::cli {

// f32 or bf16 in −1 … 1.
Tensor random_rows(const Shape& shape, Dtype dtype, std::uint64_t seed);

}  // namespace switchyard::cli
