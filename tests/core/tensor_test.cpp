// SPDX-License-Identifier: Apache-2.0
#include "switchyard/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/compare.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::tensor_test {
namespace {

template <typename Fn>
std::string message_of(Fn fn) {
  return testing::error_of<InvalidArgument>(fn);
}

TEST(Shape, CountsElementsAndRows) {
  const Shape shape{3, 4, 5};
  EXPECT_EQ(shape.num_elements(), 60);
  EXPECT_EQ(shape.row_elements(), 20);
  EXPECT_EQ(shape.with_rows(0).num_elements(), 0);
  EXPECT_EQ(shape.to_string(), "[3,4,5]");
  EXPECT_EQ(Shape{}.num_elements(), 0);
}

TEST(Tensor, MovedFromIsADefaultOne) {
  Tensor tensor = Tensor::zeros({2, 3}, Dtype::bf16);
  const Tensor taken = std::move(tensor);
  EXPECT_EQ(taken.shape(), (Shape{2, 3}));
  EXPECT_EQ(tensor.shape(), Shape());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(tensor.data(), nullptr);
  EXPECT_EQ(tensor.dtype(), Dtype::f32);
  TensorView view = Tensor::zeros({4}, Dtype::f32);
  const TensorView other = std::move(view);
  EXPECT_EQ(other.rows(), 4);
  EXPECT_EQ(view.rows(), 0);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(view.data(), nullptr);
}

TEST(TensorView, OfANullPointerHasNoElements) {
  EXPECT_EQ(message_of([] {
              (void)TensorView(static_cast<float*>(nullptr), {2, 3});
            }),
            "a tensor [2,3] of f32 is a null pointer");
  EXPECT_EQ(TensorView(static_cast<float*>(nullptr), {0, 3}).rows(), 0);
}

TEST(Shape, RejectsWhatCannotBeAddressed) {
  EXPECT_EQ(message_of([] { (void)Shape{2, -1}; }), "extent 1 of shape [2, -1] is negative");
  EXPECT_EQ(message_of([] { (void)Shape{1, 1, 1, 1, 1}; }), "a shape has 1 to 4 extents, not 5");
  const std::int64_t big = std::int64_t{1} << 40;
  EXPECT_NE(message_of([&] {
              (void)Shape{big, big};
            }).find("too many elements"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              (void)Shape{0, big, big};  // no elements, but rows of too many
            }).find("too many elements"),
            std::string::npos);
}

TEST(Tensor, IsAlignedAndHoldsItsValues) {
  const Tensor t = Tensor::from<float>({2, 3}, {1, 2, 3, 4, 5, 6});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data()) % 64, 0U);
  EXPECT_EQ(t.span<float>()[4], 5.0F);
  EXPECT_TRUE(testing::same_bits(t.clone(), t));
  EXPECT_EQ(message_of([] { (void)Tensor::from<float>({2}, {1}); }),
            "1 values were given for a tensor [2]");
}

TEST(Tensor, IsReadOnlyAsItsOwnType) {
  const Tensor t({2}, Dtype::i32);
  EXPECT_EQ(message_of([&] { (void)t.span<float>(); }), "a tensor [2] of i32 was read as f32");
}

TEST(TensorView, SlicesAndStrides) {
  Tensor t = Tensor::from<std::int32_t>({4, 2}, {0, 1, 2, 3, 4, 5, 6, 7});
  const auto rows = t.view().slice(1, 3);
  EXPECT_EQ(rows.span<std::int32_t>()[0], 2);
  EXPECT_EQ(message_of([&] { (void)t.view().slice(3, 5); }),
            "rows 3 to 5 are not a slice of [4,2]");

  const TensorView column(t.data(), Dtype::i32, {4, 1}, 2);
  EXPECT_FALSE(column.is_contiguous());
  EXPECT_EQ(*reinterpret_cast<const std::int32_t*>(column.row(3)), 6);
  EXPECT_NE(message_of([&] { (void)column.span<std::int32_t>(); }).find("not contiguous"),
            std::string::npos);
  EXPECT_EQ(message_of([&] {
              (void)TensorView(t.data(), Dtype::i32, {2, 4}, 3);
            }),
            "row stride 3 is less than a row of [2,4]");
}

TEST(TensorView, KeepsItsTensorAlive) {
  ConstTensorView view;
  {
    const Tensor t = Tensor::from<float>({1}, {7});
    view = t;
  }
  EXPECT_EQ(view.span<float>()[0], 7.0F);
}

TEST(Bfloat16, RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(to_bfloat16(1.0F).bits, 0x3f80);
  EXPECT_EQ(to_bfloat16(1.00390625F).bits, 0x3f80);  // half way, down to even
  EXPECT_EQ(to_bfloat16(1.01171875F).bits, 0x3f82);  // half way, up to even
  EXPECT_EQ(to_bfloat16(1.004F).bits, 0x3f81);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(to_float(to_bfloat16(std::numeric_limits<float>::signaling_NaN()))));
  EXPECT_EQ(to_float(Bfloat16{0x8000}), -0.0F);
}

}  // namespace
}  // namespace switchyard::tensor_test
