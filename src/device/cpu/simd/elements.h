// SPDX-License-Identifier: Apache-2.0
// The element kernels by dtype, and helpers built on them.
#pragma once

#include "device/cpu/simd/element_kernels.h"
#include "switchyard/router.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {

inline const ElementKernels::Typed& element_kernels(Dtype dtype) {
  return dtype == Dtype::f32 ? element_kernels().f32 : element_kernels().bf16;
}

// Returns element i of a vector of f32 or bf16.
float element(const ConstTensorView& vector, std::int64_t i);

// Writes rows of f32 sums to the given columns of a gradient of f32 or bf16, or adds them.
struct Columns {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
void write_gradient(const TensorView& gradient, Columns columns, const float* sums,
                    GradientMode mode);

}  // namespace switchyard::cpu
