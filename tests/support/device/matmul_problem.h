// SPDX-License-Identifier: Apache-2.0
// Matrix products on a device, and their expected results.
#pragma once

#include <cstdint>
#include <ostream>

#include "switchyard/device.h"
#include "switchyard/matmul.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

struct MatmulSizes {
  std::int64_t m, n, k;
};
std::ostream& operator<<(std::ostream& out, const MatmulSizes& sizes);

struct MatmulKind {
  Dtype in = Dtype::f32;
  Dtype out = Dtype::f32;
  MatrixLayout a_layout = MatrixLayout::plain;
  MatrixLayout b_layout = MatrixLayout::plain;
  GradientMode mode = GradientMode::overwrite;
};
template <typename Fn>
void for_each_matmul_kind(const Fn& fn) {
  for (const auto in : {Dtype::f32, Dtype::bf16}) {
    for (const auto out : {Dtype::f32, Dtype::bf16}) {
      if (in == Dtype::f32 && out == Dtype::bf16) continue;
      for (const auto a_layout : {MatrixLayout::plain, MatrixLayout::transposed}) {
        for (const auto b_layout : {MatrixLayout::plain, MatrixLayout::transposed}) {
          for (const auto mode : {GradientMode::overwrite, GradientMode::accumulate}) {
            fn(MatmulKind{in, out, a_layout, b_layout, mode});
          }
        }
      }
    }
  }
}

// A product of random matrices on a device, with `spare` elements between rows.
class MatmulProblem {
 public:
  MatmulProblem(const Device& device, const MatmulSizes& sizes, const MatmulKind& kind,
                std::int64_t spare);

  Matmul product();
  // Returns c on the host, including the elements between its rows.
  Tensor c() const { return device_.to_host(c_); }
  // Multiplies, and checks only every `step`-th row of c.
  void expect_double_precision(std::int64_t step = 1);

 private:
  Tensor stored(std::uint64_t seed, std::int64_t rows, std::int64_t columns, Dtype dtype,
                MatrixLayout layout) const;
  TensorView view(Tensor& tensor) const;

  Device device_;
  MatmulSizes sizes_;
  MatmulKind kind_;
  std::int64_t spare_;
  Tensor a_, b_, c_;
};

}  // namespace switchyard::testing
