// SPDX-License-Identifier: Apache-2.0
#include "core/overlap.h"

#include <gtest/gtest.h>

#include <set>

#include "support/random.h"

namespace switchyard::overlap_test {
namespace {

std::set<const std::byte*> bytes_in(const ConstTensorView& view) {
  std::set<const std::byte*> bytes;
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    for (std::int64_t b = 0; b < view.row_bytes(); ++b) bytes.insert(view.row(r) + b);
  }
  return bytes;
}

bool share_bytes(const ConstTensorView& a, const ConstTensorView& b) {
  const auto of_b = bytes_in(b);
  for (const auto* byte : bytes_in(a)) {
    if (of_b.contains(byte)) return true;
  }
  return false;
}

TEST(Overlap, ColumnsOfOneMatrixDoNotOverlap) {
  Tensor matrix({4, 6}, Dtype::f32);
  const auto columns = [&](std::int64_t first, std::int64_t count) {
    return TensorView(matrix.data() + 4 * first, Dtype::f32, {4, count}, 6);
  };
  EXPECT_FALSE(share_memory(columns(0, 3), columns(3, 3)));
  EXPECT_FALSE(share_memory(columns(4, 2), columns(0, 4)));
  EXPECT_TRUE(share_memory(columns(0, 4), columns(3, 3)));
  EXPECT_TRUE(share_memory(matrix, columns(5, 1)));
  EXPECT_FALSE(share_memory(matrix.view().slice(0, 2), matrix.view().slice(2, 4)));
  EXPECT_FALSE(share_memory(matrix, TensorView()));
}

TEST(Overlap, IsThatOfTheBytes) {
  Tensor memory({200}, Dtype::bf16);
  testing::Random random(3);
  int num_shared = 0;
  for (int i = 0; i < 5000; ++i) {
    const auto view = [&] {
      const Dtype dtype = random.below(2) == 0 ? Dtype::bf16 : Dtype::f32;
      const auto columns = random.below(5) + 1;
      const auto stride = columns + random.below(7);
      const auto begin = random.below(21) * size_of(dtype);
      return TensorView(memory.data() + begin, dtype, {random.below(6) + 1, columns}, stride);
    };
    const auto a = view();
    const auto b = view();
    EXPECT_EQ(share_memory(a, b), share_bytes(a, b))
        << a.shape().to_string() << " every " << a.row_stride() << " and " << b.shape().to_string()
        << " every " << b.row_stride() << ", " << b.data() - a.data() << " bytes on";
    num_shared += share_memory(a, b) ? 1 : 0;
  }
  EXPECT_GT(num_shared, 100);
  EXPECT_LT(num_shared, 4900);
}

}  // namespace
}  // namespace switchyard::overlap_test
