// Public products of matrices against double precision, to the bit over threads, and their errors.
#include "switchyard/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <vector>

#include "support/compare.h"
#include "support/errors.h"
#include "support/moe_reference.h"
#include "support/random.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

using testing::doubles_of;
using testing::error_of;
using testing::Random;

constexpr auto kPlain = MatrixLayout::plain;
constexpr auto kTransposed = MatrixLayout::transposed;

struct Sizes {
  std::int64_t m, n, k;
};
std::ostream& operator<<(std::ostream& out, const Sizes& sizes) {
  return out << sizes.m << "x" << sizes.n << "x" << sizes.k;
}

struct Types {
  Dtype in;
  Dtype out;
};
constexpr Types kTypes[] = {
    {Dtype::f32, Dtype::f32}, {Dtype::bf16, Dtype::bf16}, {Dtype::bf16, Dtype::f32}};

// Memory of a product; rows lie `spare` elements apart.
struct Operands {
  Operands(const Sizes& sizes, const Types& types, std::int64_t the_spare, MatrixLayout a_layout,
           MatrixLayout b_layout)
      : spare(the_spare),
        a(stored(1, sizes.m, sizes.k, types.in, a_layout)),
        b(stored(2, sizes.k, sizes.n, types.in, b_layout)),
        c(stored(3, sizes.m, sizes.n, types.out, kPlain)),
        layouts{a_layout, b_layout} {}

  Matmul product(GradientMode mode) {
    return {.a = view(a),
            .b = view(b),
            .c = view(c),
            .a_layout = layouts[0],
            .b_layout = layouts[1],
            .mode = mode};
  }

  std::int64_t spare;
  Tensor a, b, c;
  MatrixLayout layouts[2];

 private:
  Tensor stored(std::uint64_t seed, std::int64_t rows, std::int64_t columns, Dtype dtype,
                MatrixLayout layout) const {
    if (layout == kTransposed) std::swap(rows, columns);
    return Random(seed).tensor({rows, columns + spare}, dtype);
  }
  TensorView view(Tensor& tensor) const {
    const auto stride = tensor.shape()[1];
    return {tensor.data(),
            tensor.dtype(),
            {tensor.rows(), stride - spare},
            stride,
            tensor.view().owner()};
  }
};

// at(row, column) of a matrix as it is named.
auto values_of(const ConstTensorView& view, MatrixLayout layout) {
  return [all = doubles_of(view), layout](std::int64_t row, std::int64_t column) {
    return layout == kPlain ? all.row(row)[column] : all.row(column)[row];
  };
}

void expect_double_precision(const Device& device, const Sizes& sizes, Operands& operands,
                             GradientMode mode) {
  const Matmul product = operands.product(mode);
  const auto before = doubles_of(operands.c);
  matmul(device, product);
  const auto after = doubles_of(operands.c);
  const auto a = values_of(product.a, product.a_layout);
  const auto b = values_of(product.b, product.b_layout);
  // f32 sums in any order, and one rounding if c is bf16.
  const double half_unit = product.c.dtype() == Dtype::bf16 ? 0x1p-8 : 0x1p-24;
  for (std::int64_t i = 0; i < sizes.m; ++i) {
    for (std::int64_t j = 0; j < sizes.n + operands.spare; ++j) {
      if (j >= sizes.n) {  // what lies between the rows is not touched
        ASSERT_EQ(after.row(i)[j], before.row(i)[j]);
        continue;
      }
      double expected = mode == GradientMode::accumulate ? before.row(i)[j] : 0.0;
      double size = std::abs(expected);
      for (std::int64_t l = 0; l < sizes.k; ++l) {
        const double term = a(i, l) * b(l, j);
        expected += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(after.row(i)[j], expected, half_unit * std::abs(expected) + 0x1p-21 * size)
          << sizes << ": [" << i << "," << j << "]";
    }
  }
}

template <typename Fn>
void for_each_kind(const Fn& fn) {
  for (const Types& types : kTypes) {
    for (const auto a_layout : {kPlain, kTransposed}) {
      for (const auto b_layout : {kPlain, kTransposed}) {
        for (const auto mode : {GradientMode::overwrite, GradientMode::accumulate}) {
          fn(types, a_layout, b_layout, mode);
        }
      }
    }
  }
}

TEST(Matmul, EqualsDoublePrecision) {
  const auto device = Device::cpu({.num_threads = 2});
  for (const Sizes sizes :
       {Sizes{1, 1, 1}, Sizes{1, 64, 17}, Sizes{17, 1, 100}, Sizes{64, 17, 1}, Sizes{100, 64, 17},
        Sizes{300, 17, 64}, Sizes{17, 300, 100}, Sizes{70, 600, 20}}) {
    for_each_kind([&](const Types& types, auto a_layout, auto b_layout, auto mode) {
      for (const std::int64_t spare : {0, 5}) {
        Operands operands(sizes, types, spare, a_layout, b_layout);
        expect_double_precision(device, sizes, operands, mode);
      }
    });
  }
}

TEST(Matmul, ProductsOfNothing) {
  const Device device;
  for_each_kind([&](const Types& types, auto a_layout, auto b_layout, auto mode) {
    for (const Sizes sizes : {Sizes{70, 3, 0}, Sizes{0, 3, 4}, Sizes{3, 0, 4}, Sizes{0, 0, 0}}) {
      for (const std::int64_t spare : {0, 2}) {
        Operands operands(sizes, types, spare, a_layout, b_layout);
        expect_double_precision(device, sizes, operands, mode);
      }
    }
  });
  matmul(device, std::span<const Matmul>());
}

// Sizes of several tasks each, by rows and columns of c, and some of one.
TEST(Matmul, BitsDependNeitherOnThreadsNorOnCompany) {
  const std::vector<Sizes> all_sizes{{300, 100, 64}, {1, 17, 300}, {130, 600, 300}, {600, 17, 9}};
  for_each_kind([&](const Types& types, auto a_layout, auto b_layout, auto mode) {
    const Device one;
    std::vector<Tensor> alone;
    for (const Sizes& sizes : all_sizes) {
      Operands operands(sizes, types, 3, a_layout, b_layout);
      matmul(one, operands.product(mode));
      alone.push_back(std::move(operands.c));
    }
    for (const int threads : {1, 2, 4}) {
      std::vector<Operands> operands;
      for (const Sizes& sizes : all_sizes) {
        operands.emplace_back(sizes, types, 3, a_layout, b_layout);
      }
      std::vector<Matmul> products;
      for (Operands& each : operands) products.push_back(each.product(mode));
      matmul(Device::cpu({.num_threads = threads}), products);
      for (std::size_t i = 0; i < operands.size(); ++i) {
        ASSERT_TRUE(testing::same_bits(operands[i].c, alone[i])) << threads << ", " << i;
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
            "a is f32, but b is bf16: they must be alike");
  EXPECT_EQ(error_with(f32({2, 3}), f32({3, 4}), bf16({2, 4})),
            "c is bf16, but must be f32 as a and b are");
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

}  // namespace
}  // namespace switchyard
