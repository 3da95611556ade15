// SPDX-License-Identifier: Apache-2.0
// Matrix products of every layout, stride and dtype against double precision.
#include "device/cpu/gemm/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <ostream>
#include <vector>

#include "support/compare.h"
#include "support/random.h"
#include "support/reference/moe_reference.h"

namespace switchyard::cpu::gemm_test {
namespace {

using testing::Random;

struct Sizes {
  std::int64_t m, n, k;
};

// A matrix in memory, some columns wider than it needs to be.
struct Stored {
  Stored(std::uint64_t seed, std::int64_t the_rows, std::int64_t the_columns, Dtype dtype,
         std::int64_t spare, Layout the_layout = Layout::plain)
      : layout(the_layout),
        stride((layout == Layout::plain ? the_columns : the_rows) + spare),
        memory(Random(seed).tensor(
            {layout == Layout::plain ? the_rows : the_columns, std::max<std::int64_t>(stride, 1)},
            dtype)) {}

  // values(row, column)
  auto values() const {
    return [all = testing::doubles_of(memory.view()), s = stride, plain = layout == Layout::plain](
               std::int64_t row, std::int64_t column) {
      const auto i = plain ? row * s + column : column * s + row;
      return all.values[static_cast<std::size_t>(i)];
    };
  }
  MatrixIn in() const { return {memory.data(), stride, layout}; }
  MatrixOut out() { return {memory.data(), stride, memory.dtype()}; }

  Layout layout;
  std::int64_t stride;
  Tensor memory;
};

struct Types {
  Dtype in;
  Dtype out;
};

struct Case {
  Sizes sizes;
  Layout a_layout, b_layout;
  std::int64_t spare;
  bool accumulate;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  const auto letter = [](Layout layout) { return layout == Layout::plain ? 'N' : 'T'; };
  return out << c.sizes.m << "x" << c.sizes.n << "x" << c.sizes.k << " " << letter(c.a_layout)
             << letter(c.b_layout) << (c.accumulate ? " added" : "") << ", " << c.spare << " spare";
}

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const Sizes sizes :
       {Sizes{1, 1, 1}, Sizes{3, 5, 7}, Sizes{16, 16, 16}, Sizes{17, 33, 65}, Sizes{64, 48, 100},
        Sizes{1, 40, 9}, Sizes{40, 1, 9}, Sizes{9, 40, 1}, Sizes{5, 3, 400}}) {
    for (const Layout a : {Layout::plain, Layout::transposed}) {
      for (const Layout b : {Layout::plain, Layout::transposed}) {
        for (const std::int64_t spare : {0, 3}) {
          for (const bool accumulate : {false, true}) {
            result.push_back({sizes, a, b, spare, accumulate});
          }
        }
      }
    }
  }
  return result;
}

void expect_double_precision(const Types& types, const Case& c) {
  const auto [m, n, k] = c.sizes;
  const Stored a(1, m, k, types.in, c.spare, c.a_layout);
  const Stored b(2, k, n, types.in, c.spare, c.b_layout);
  const Stored before(3, m, n, types.out, c.spare);
  Stored after(3, m, n, types.out, c.spare);
  Scratch scratch;
  gemm({.m = m,
        .n = n,
        .k = k,
        .dtype = types.in,
        .a = a.in(),
        .b = b.in(),
        .c = after.out(),
        .accumulate = c.accumulate},
       scratch);
  const auto at_a = a.values();
  const auto at_b = b.values();
  const auto at_c = after.values();
  const auto at_before = before.values();
  // f32 sums in any order, and one rounding if c is bf16.
  const double half_unit = types.out == Dtype::bf16 ? 0x1p-8 : 0x1p-24;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < after.stride; ++j) {
      if (j >= n) {  // what lies between the rows is not touched
        ASSERT_EQ(at_c(i, j), at_before(i, j));
        continue;
      }
      double expected = c.accumulate ? at_before(i, j) : 0.0;
      double size = std::abs(expected);
      for (std::int64_t l = 0; l < k; ++l) {
        const double term = at_a(i, l) * at_b(l, j);
        expected += term;
        size += std::abs(term);
      }
      const double rounding = half_unit * std::abs(expected) + 0x1p-21 * size;
      ASSERT_NEAR(at_c(i, j), expected, rounding) << c << ": [" << i << "," << j << "]";
    }
  }
}

class GemmTest : public ::testing::TestWithParam<Types> {
 private:
  const SingleThreaded single_threaded_;
};

TEST_P(GemmTest, EqualsDoublePrecision) {
  for (const Case& c : cases()) expect_double_precision(GetParam(), c);
}

TEST_P(GemmTest, SumsOfNothingAreZeroOrWhatWasThere) {
  const auto [in, out] = GetParam();
  Scratch scratch;
  const Stored a(1, 4, 0, in, 2);
  const Stored b(2, 0, 3, in, 2);
  const Stored before(3, 4, 3, out, 2);
  Stored c(3, 4, 3, out, 2);
  Gemm args{.m = 4, .n = 3, .k = 0, .dtype = in, .a = a.in(), .b = b.in(), .c = c.out()};
  args.accumulate = true;
  gemm(args, scratch);
  EXPECT_TRUE(testing::same_bits(c.memory, before.memory));
  args.m = 0;
  args.accumulate = false;
  gemm(args, scratch);
  args.m = 4;
  args.n = 0;
  gemm(args, scratch);
  EXPECT_TRUE(testing::same_bits(c.memory, before.memory));
  args.n = 3;
  gemm(args, scratch);
  const auto at_c = c.values();
  const auto at_before = before.values();
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 5; ++j) {
      EXPECT_EQ(at_c(i, j), j < 3 ? 0.0 : at_before(i, j));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GemmTest,
                         ::testing::Values(Types{Dtype::f32, Dtype::f32},
                                           Types{Dtype::bf16, Dtype::bf16},
                                           Types{Dtype::bf16, Dtype::f32}),
                         [](const auto& param) {
                           return std::string(name_of(param.param.in)) + "_to_" +
                                  std::string(name_of(param.param.out));
                         });

// Overwriting ignores the old values, even NaN.
TEST(Gemm, OverwritesNaN) {
  Scratch scratch;
  const SingleThreaded single_threaded;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Stored a(1, 20, 30, dtype, 0);
    const Stored b(2, 30, 40, dtype, 0);
    Stored c(3, 20, 40, dtype, 0);
    testing::poison(c.memory);
    gemm({.m = 20, .n = 40, .k = 30, .dtype = dtype, .a = a.in(), .b = b.in(), .c = c.out()},
         scratch);
    const auto at_c = c.values();
    for (std::int64_t i = 0; i < 20; ++i) ASSERT_FALSE(std::isnan(at_c(i, i)));
  }
}

// If oneDNN is told not to use bf16 units, these tests cover bf16 products made from f32 ones.
TEST(Gemm, LibraryObeysItsLimits) {
  const std::string library = gemm_library();
  EXPECT_NE(library, "");
  const char* isa = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (isa == nullptr || library.find("oneDNN") == std::string::npos) return;
  EXPECT_EQ(library == "oneDNN, bf16 computed in f32", std::string(isa) == "AVX2") << library;
}

}  // namespace
}  // namespace switchyard::cpu::gemm_test
