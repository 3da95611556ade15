// SPDX-License-Identifier: Apache-2.0
#include "support/device/matmul_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "support/random.h"
#include "support/reference/moe_reference.h"

namespace switchyard::testing {
namespace {

// Returns a function that reads an element by its logical row and column, for either layout.
auto values_of(const Tensor& stored, MatrixLayout layout) {
  return [all = doubles_of(stored), layout](std::int64_t row, std::int64_t column) {
    return layout == MatrixLayout::plain ? all.row(row)[column] : all.row(column)[row];
  };
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const MatmulSizes& sizes) {
  return out << sizes.m << "x" << sizes.n << "x" << sizes.k;
}

MatmulProblem::MatmulProblem(const Device& device, const MatmulSizes& sizes, const MatmulKind& kind,
                             std::int64_t spare)
    : device_(device),
      sizes_(sizes),
      kind_(kind),
      spare_(spare),
      a_(stored(1, sizes.m, sizes.k, kind.in, kind.a_layout)),
      b_(stored(2, sizes.k, sizes.n, kind.in, kind.b_layout)),
      c_(stored(3, sizes.m, sizes.n, kind.out, MatrixLayout::plain)) {}

Matmul MatmulProblem::product() {
  return {.a = view(a_),
          .b = view(b_),
          .c = view(c_),
          .a_layout = kind_.a_layout,
          .b_layout = kind_.b_layout,
          .mode = kind_.mode};
}

Tensor MatmulProblem::stored(std::uint64_t seed, std::int64_t rows, std::int64_t columns,
                             Dtype dtype, MatrixLayout layout) const {
  if (layout == MatrixLayout::transposed) std::swap(rows, columns);
  return device_.copy_of(Random(seed).tensor({rows, columns + spare_}, dtype));
}

TensorView MatmulProblem::view(Tensor& tensor) const {
  const auto stride = tensor.shape()[1];
  return {tensor.data(), tensor.dtype(),        {tensor.rows(), stride - spare_},
          stride,        tensor.view().owner(), tensor.memory()};
}

void MatmulProblem::expect_double_precision(std::int64_t step) {
  const auto before = doubles_of(c());
  matmul(device_, product());
  const auto after = doubles_of(c());
  const auto a = values_of(device_.to_host(a_), kind_.a_layout);
  const auto b = values_of(device_.to_host(b_), kind_.b_layout);
  // The tolerance allows f32 sums in any order, and one rounding if c is bf16.
  const double half_unit = kind_.out == Dtype::bf16 ? 0x1p-8 : 0x1p-24;
  for (std::int64_t i = 0; i < sizes_.m; i += step) {
    for (std::int64_t j = 0; j < sizes_.n + spare_; ++j) {
      if (j >= sizes_.n) {  // padding between rows is untouched
        ASSERT_EQ(after.row(i)[j], before.row(i)[j]);
        continue;
      }
      double expected = kind_.mode == GradientMode::accumulate ? before.row(i)[j] : 0.0;
      double size = std::abs(expected);
      for (std::int64_t l = 0; l < sizes_.k; ++l) {
        const double term = a(i, l) * b(l, j);
        expected += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(after.row(i)[j], expected, half_unit * std::abs(expected) + 0x1p-21 * size)
          << sizes_ << ": [" << i << "," << j << "]";
    }
  }
}

}  // namespace switchyard::testing
