// SPDX-License-Identifier: Apache-2.0
// Public products of matrices on threads of a CPU, to the bit, and their errors.
#include "switchyard/matmul.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/compare.h"
#include "support/device/matmul_problem.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/error.h"

namespace switchyard::matmul_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::for_each_matmul_kind;
using testing::MatmulKind;
using testing::MatmulProblem;
using testing::MatmulSizes;
using testing::Random;

constexpr auto kPlain = MatrixLayout::plain;
constexpr auto kTransposed = MatrixLayout::transposed;

// Sizes of several tasks each, by rows and columns of c, and some of one.
TEST(Matmul, BitsDependNeitherOnThreadsNorOnOtherProducts) {
  const std::vector<MatmulSizes> all_sizes{
      {300, 100, 64}, {1, 17, 300}, {130, 600, 300}, {600, 17, 9}};
  for_each_matmul_kind([&](const MatmulKind& kind) {
    const Device one;
    std::vector<Tensor> alone;
    for (const MatmulSizes& sizes : all_sizes) {
      MatmulProblem problem(one, sizes, kind, 3);
      matmul(one, problem.product());
      alone.push_back(problem.c());
    }
    for (const int threads : {1, 2, 4}) {
      std::vector<MatmulProblem> problems;
      for (const MatmulSizes& sizes : all_sizes) problems.emplace_back(one, sizes, kind, 3);
      std::vector<Matmul> products;
      for (MatmulProblem& each : problems) products.push_back(each.product());
      matmul(Device::cpu({.num_threads = threads}), products);
      for (std::size_t i = 0; i < problems.size(); ++i) {
        ASSERT_TRUE(testing::same_bits(problems[i].c(), alone[i])) << threads << ", " << i;
      }
    }
  });
}

std::string error_with(const Tensor& a, const Tensor& b, Tensor c, MatrixLayout a_layout = kPlain,
                       MatrixLayout b_layout = kPlain) {
  const auto before = c.clone();
  const auto message = error_of<InvalidArgument>([&] {
    matmul({}, Matmul{.a = a, .b = b, .c = c, .a_layout = a_layout, .b_layout = b_layout});
  });
  EXPECT_TRUE(testing::same_bits(c, before));
  return message;
}

Tensor f32(const Shape& shape) { return Tensor::zeros(shape, Dtype::f32); }
Tensor bf16(const Shape& shape) { return Tensor::zeros(shape, Dtype::bf16); }

TEST(Matmul, NamesWhatDoesNotFit) {
  EXPECT_EQ(error_with(f32({3}), f32({3, 4}), f32({3, 4})),
            "a is f32 [3], but must be a matrix of f32 or bf16");
  EXPECT_EQ(error_with(f32({2, 3}), f32({3, 2, 2}), f32({2, 4})),
            "b is f32 [3,2,2], but must be a matrix of f32 or bf16");
  EXPECT_EQ(error_with(f32({2, 3}), f32({3, 4}), Tensor::zeros({2, 4}, Dtype::i32)),
            "c is i32 [2,4], but must be a matrix of f32 or bf16");
  EXPECT_EQ(error_with(f32({2, 3}), bf16({3, 4}), f32({2, 4})),
            "a is f32, but b is bf16: they must have the same dtype");
  EXPECT_EQ(error_with(f32({2, 3}), f32({3, 4}), bf16({2, 4})),
            "c is bf16, but must be f32 because a and b are");
  EXPECT_EQ(error_with(f32({2, 3}), f32({4, 3}), f32({2, 4})),
            "a is [2,3] and b is [4,3]: a has 3 columns, but b has 4 rows");
  EXPECT_EQ(error_with(f32({2, 3}), f32({5, 4}), f32({3, 5}), kTransposed, kTransposed),
            "a is [2,3] transposed and b is [5,4] transposed: a has 2 columns, but b has 4 rows");
  EXPECT_EQ(error_with(f32({2, 3}), f32({4, 3}), f32({4, 2}), kPlain, kTransposed),
            "c is [4,2], but the product of a [2,3] and b [4,3] transposed is [2,4]");
}

TEST(Matmul, NamesTheProductAndWritesNone) {
  const Tensor a = Random(1).tensor({2, 3}, Dtype::f32);
  const Tensor b = Random(2).tensor({3, 4}, Dtype::f32);
  Tensor first = f32({2, 4});
  Tensor second = f32({2, 5});
  const std::vector<Matmul> products{{.a = a, .b = b, .c = first}, {.a = a, .b = b, .c = second}};
  EXPECT_EQ(error_of<InvalidArgument>([&] { matmul({}, products); }),
            "product 1 of 2: c is [2,5], but the product of a [2,3] and b [3,4] is [2,4]");
  EXPECT_TRUE(testing::same_bits(first, f32({2, 4})));
}

TEST(Matmul, RefusesMemoryThatTheDeviceCannotReach) {
  Tensor a = f32({2, 3});
  Tensor b = f32({3, 4});
  Tensor c = f32({2, 4});
  const auto error = [](const Matmul& product) {
    return error_of<InvalidArgument>([&] { matmul({}, product); });
  };
  const std::string rest =
      " is in gpu memory, but the device works in host memory; copy it with Device::copy_of";
  EXPECT_EQ(error({.a = elsewhere(a), .b = b, .c = c}), "a [2,3]" + rest);
  EXPECT_EQ(error({.a = a, .b = elsewhere(b), .c = c}), "b [3,4]" + rest);
  EXPECT_EQ(error({.a = a, .b = b, .c = elsewhere(c)}), "c [2,4]" + rest);
}

}  // namespace
}  // namespace switchyard::matmul_test
