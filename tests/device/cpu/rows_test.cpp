// SPDX-License-Identifier: Apache-2.0
// The row kernels of every instruction set against plain loops, to the bit.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "device/cpu/kernels.h"
#include "device/cpu/simd/row_kernels.h"
#include "support/compare.h"
#include "support/random.h"

namespace switchyard::cpu::rows_test {
namespace {

using testing::Random;
using testing::same_bits;

float get(const Tensor& t, std::int64_t i) {
  const auto at = static_cast<std::size_t>(i);
  return t.dtype() == Dtype::bf16 ? to_float(t.span<Bfloat16>()[at]) : t.span<float>()[at];
}

void set(Tensor& t, std::int64_t i, float value) {
  const auto at = static_cast<std::size_t>(i);
  if (t.dtype() == Dtype::bf16) {
    t.span<Bfloat16>()[at] = to_bfloat16(value);
  } else {
    t.span<float>()[at] = value;
  }
}

struct Case {
  const RowKernels* kernels;
  Dtype dtype;
  std::int64_t elements;
  Stores stores;
};

std::string name_of(const Case& c) {
  return std::string(c.kernels->name) + "_" + std::string(switchyard::name_of(c.dtype)) + "_" +
         std::to_string(c.elements) + (c.stores == Stores::streaming ? "_streaming" : "");
}

void PrintTo(const Case& c, std::ostream* out) { *out << name_of(c); }

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const auto* kernels : row_kernels_of_this_cpu()) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const std::int64_t elements : {1, 15, 16, 17, 32, 96, 100, 2048}) {
        result.push_back({kernels, dtype, elements, Stores::cached});
        if (elements % 32 == 0) result.push_back({kernels, dtype, elements, Stores::streaming});
      }
    }
  }
  return result;
}

class RowKernelTest : public ::testing::TestWithParam<Case> {
 protected:
  const RowKernels::Typed& typed() const {
    return GetParam().dtype == Dtype::f32 ? GetParam().kernels->f32 : GetParam().kernels->bf16;
  }
  Tensor row(std::uint64_t seed) const {
    return Random(seed).tensor({GetParam().elements}, GetParam().dtype);
  }
};

TEST_P(RowKernelTest, CopyAndScaleWriteEveryPlace) {
  const auto& [kernels, dtype, elements, stores] = GetParam();
  const Tensor from = row(1);
  Tensor a({elements}, dtype);
  Tensor b({elements}, dtype);
  const std::array<std::byte*, 2> to{a.data(), b.data()};
  kernels->copy(to.data(), 2, from.data(), from.bytes(), stores);
  kernels->publish();
  EXPECT_TRUE(same_bits(a, from));
  EXPECT_TRUE(same_bits(b, from));

  const std::array<float, 2> factors{0.7F, -1.3F};
  typed().scale(to.data(), factors.data(), 2, from.data(), elements, stores);
  kernels->publish();
  Tensor expected({elements}, dtype);
  for (std::int64_t i = 0; i < elements; ++i) set(expected, i, 0.7F * get(from, i));
  EXPECT_TRUE(same_bits(a, expected));
  for (std::int64_t i = 0; i < elements; ++i) set(expected, i, -1.3F * get(from, i));
  EXPECT_TRUE(same_bits(b, expected));
}

TEST_P(RowKernelTest, SumAddsInOrder) {
  const auto& [kernels, dtype, elements, stores] = GetParam();
  constexpr int kMost = 10;  // beyond the number of terms that is known to the kernels
  std::vector<Tensor> terms;
  std::vector<const std::byte*> from;
  std::vector<float> weights;
  for (int c = 0; c < kMost; ++c) {
    terms.push_back(row(static_cast<std::uint64_t>(c + 1)));
    from.push_back(terms.back().data());
    weights.push_back(0.1F * static_cast<float>(c + 1));
  }
  for (const bool weighted : {false, true}) {
    for (int count = 0; count <= kMost; ++count) {
      Tensor expected({elements}, dtype);
      for (std::int64_t i = 0; i < elements; ++i) {
        float total = 0.0F;
        for (int c = 0; c < count; ++c) {
          const auto at = static_cast<std::size_t>(c);
          const float term = weighted ? weights[at] * get(terms[at], i) : get(terms[at], i);
          total = c == 0 ? term : total + term;
        }
        set(expected, i, total);
      }
      Tensor to({elements}, dtype);
      testing::poison(to);
      typed().sum(to.data(),
                  {.rows = from.data(),
                   .weights = weighted ? weights.data() : nullptr,
                   .count = count,
                   .later_rows = from.data(),
                   .later_count = count},
                  elements, stores);
      kernels->publish();
      EXPECT_TRUE(same_bits(to, expected)) << count << " terms";
    }
  }
}

TEST_P(RowKernelTest, DotHasTheSameBitsOnEveryInstructionSet) {
  const auto& [kernels, dtype, elements, stores] = GetParam();
  const Tensor a = row(1);
  const Tensor b = row(2);
  const float dot = typed().dot(a.data(), b.data(), elements);
  const auto& baseline = dtype == Dtype::f32 ? kRowKernels_baseline.f32 : kRowKernels_baseline.bf16;
  EXPECT_EQ(dot, baseline.dot(a.data(), b.data(), elements));
  double expected = 0.0;
  double size = 0.0;
  for (std::int64_t i = 0; i < elements; ++i) {
    expected += static_cast<double>(get(a, i)) * get(b, i);
    size += std::abs(static_cast<double>(get(a, i)) * get(b, i));
  }
  EXPECT_NEAR(dot, expected, 1e-6 * size);
}

INSTANTIATE_TEST_SUITE_P(All, RowKernelTest, ::testing::ValuesIn(cases()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST(RowKernels, KeepSpecialValues) {
  for (const auto* kernels : row_kernels_of_this_cpu()) {
    // −0 alone stays −0; a NaN whose low bits are its only bits stays a NaN in bf16.
    const Tensor from = Tensor::from<float>({2}, {-0.0F, INFINITY});
    Tensor to({2}, Dtype::f32);
    const std::byte* term = from.data();
    kernels->f32.sum(to.data(), {.rows = &term, .count = 1}, 2, Stores::cached);
    EXPECT_TRUE(same_bits(to, from));
    Tensor bf16 = Tensor::from<Bfloat16>({1}, {Bfloat16{0x7f81}});
    Tensor out({1}, Dtype::bf16);
    std::byte* place = out.data();
    const float one = 1.0F;
    kernels->bf16.scale(&place, &one, 1, bf16.data(), 1, Stores::cached);
    EXPECT_TRUE(std::isnan(to_float(out.span<Bfloat16>()[0])));
  }
}

// Two buffers, a row that goes nowhere, and pads after each group of the first buffer.
TEST(Rows, ScalarsTravelAlongAndPadsBecomeZero) {
  const Tensor from = Random(3).tensor({3, 4}, Dtype::f32);
  Tensor rows({6, 4}, Dtype::f32);
  Tensor other({2, 4}, Dtype::f32);
  Tensor scalars({6}, Dtype::f32);
  Tensor other_scalars({2}, Dtype::f32);
  for (Tensor* t : {&rows, &other, &scalars, &other_scalars}) testing::poison(*t);
  const std::array<std::int32_t, 6> slots{0, 1, -1, 4, 3, 0};
  const std::array<std::int32_t, 6> buffers{0, 1, -1, 0, 0, 1};
  const std::array<std::byte*, 2> bases{rows.data(), other.data()};
  const std::array<std::byte*, 2> scalar_bases{scalars.data(), other_scalars.data()};
  const std::array<float, 6> sent{1, 2, 3, 4, 5, 6};
  const RowTable table{3, 2, slots.data(), buffers.data(), bases};
  Workers workers(2);
  scatter_rows({.from = from,
                .to = table,
                .scalars = sent.data(),
                .scalar_bases = scalar_bases,
                .pads = PadRows{.rows = rows,
                                .scalars = scalars.view(),
                                .row_offsets = Tensor::from<std::int32_t>({3}, {0, 3, 6}),
                                .group_rows = Tensor::from<std::int32_t>({2}, {1, 2})}},
               workers);
  EXPECT_TRUE(same_bits(scalars, Tensor::from<float>({6}, {1, 0, 0, 5, 4, 0})));
  EXPECT_TRUE(same_bits(other_scalars, Tensor::from<float>({2}, {6, 2})));
  const Tensor zero = Tensor::zeros({1, 4}, Dtype::f32);
  for (const std::int64_t pad : {1, 2, 5}) {
    EXPECT_TRUE(same_bits(rows.view().slice(pad, pad + 1), zero)) << pad;
  }
  EXPECT_TRUE(same_bits(rows.view().slice(4, 5), from.view().slice(1, 2)));

  std::array<float, 6> fetched{-1, -1, -1, -1, -1, -1};
  Tensor back({3, 4}, Dtype::f32);
  gather_rows({.from = table, .to = back, .scalar_bases = scalar_bases, .scalars = fetched.data()},
              workers);
  EXPECT_EQ(fetched, (std::array<float, 6>{1, 2, 0, 4, 5, 6}));
  EXPECT_TRUE(same_bits(back.view().slice(1, 2), from.view().slice(1, 2)));
}

TEST(Rows, PadsBecomeZeroWithoutTokens) {
  Tensor rows({2, 4}, Dtype::f32);
  testing::poison(rows);
  const std::array<std::byte*, 1> base{rows.data()};
  Workers workers(2);
  scatter_rows({.from = Tensor({0, 4}, Dtype::f32),
                .to = {0, 2, nullptr, nullptr, base},
                .pads = PadRows{.rows = rows,
                                .row_offsets = Tensor::from<std::int32_t>({2}, {0, 2}),
                                .group_rows = Tensor::from<std::int32_t>({1}, {0})}},
               workers);
  EXPECT_TRUE(same_bits(rows, Tensor::zeros({2, 4}, Dtype::f32)));
}

// Rows whose byte offsets pass 2³².
TEST(Rows, OffsetsBeyondInt32) {
  const std::int64_t hidden = 64 * 1024;
  const std::int64_t rows = 17000;  // 4.4 GB
  Tensor buffer({rows, hidden}, Dtype::f32);
  const Tensor from = Random(5).tensor({2, hidden}, Dtype::f32);
  const std::array<std::int32_t, 2> slots{16999, 3};
  const std::array<std::byte*, 1> base{buffer.data()};
  const RowTable table{2, 1, slots.data(), nullptr, base};
  Workers workers(3);
  scatter_rows({.from = from, .to = table}, workers);
  EXPECT_TRUE(same_bits(buffer.view().slice(16999, 17000), from.view().slice(0, 1)));
  Tensor back({2, hidden}, Dtype::f32);
  gather_rows({.from = table, .to = back}, workers);
  EXPECT_TRUE(same_bits(back, from));
}

}  // namespace
}  // namespace switchyard::cpu::rows_test
