// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/simd/elements.h"

#include <cstring>

namespace switchyard::cpu {

float element(const ConstTensorView& vector, std::int64_t i) {
  return vector.dtype() == Dtype::f32
             ? reinterpret_cast<const float*>(vector.data())[i]
             : to_float(reinterpret_cast<const Bfloat16*>(vector.data())[i]);
}

void write_gradient(const TensorView& gradient, Columns columns, const float* sums,
                    GradientMode mode) {
  const auto width = columns.last - columns.first;
  for (std::int64_t r = 0; r < gradient.rows(); ++r) {
    std::byte* to = gradient.row(r) + columns.first * size_of(gradient.dtype());
    const float* from = sums + r * width;
    if (mode == GradientMode::accumulate) {
      element_kernels(gradient.dtype()).add(to, from, width);
    } else if (gradient.dtype() == Dtype::f32) {
      std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(float));
    } else {
      element_kernels().narrow(to, from, width);
    }
  }
}

}  // namespace switchyard::cpu
