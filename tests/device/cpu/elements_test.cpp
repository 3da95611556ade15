// SPDX-License-Identifier: Apache-2.0
// The element kernels of every instruction set against the standard library in double precision.
#include "device/cpu/simd/elements.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/compare.h"
#include "support/random.h"
#include "support/reference/moe_reference.h"

namespace switchyard::cpu::elements_test {
namespace {

using testing::Random;
using testing::wide_range;

constexpr auto kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr auto kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kLengths[]{1, 3, 15, 16, 17, 31, 33, 64, 100};

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }

class ElementKernelTest : public ::testing::TestWithParam<const ElementKernels*> {
 protected:
  const ElementKernels& kernels() const { return *GetParam(); }
  const ElementKernels::Typed& typed(Dtype dtype) const {
    return dtype == Dtype::f32 ? kernels().f32 : kernels().bf16;
  }
};

TEST_P(ElementKernelTest, WidenAndNarrowAsTheScalars) {
  for (const auto n : kLengths) {
    Tensor wide = Random(1).tensor({n + 1}, Dtype::f32);
    wide.span<float>()[0] = n % 2 == 0 ? kNaN : kInfinity;
    Tensor narrow({n + 1}, Dtype::bf16);
    testing::poison(narrow);
    kernels().narrow(narrow.data(), wide.span<float>().data(), n);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      ASSERT_EQ(narrow.span<Bfloat16>()[i].bits, to_bfloat16(wide.span<float>()[i]).bits);
    }
    EXPECT_EQ(narrow.span<Bfloat16>().back().bits, 0xffff);  // not beyond the end
    const float last = wide.span<float>().back();
    kernels().widen(wide.span<float>().data(), narrow.data(), n);
    for (std::size_t i = 1; i < static_cast<std::size_t>(n); ++i) {
      ASSERT_EQ(wide.span<float>()[i], to_float(narrow.span<Bfloat16>()[i]));
    }
    EXPECT_EQ(wide.span<float>().back(), last);
  }
}

TEST_P(ElementKernelTest, SigmoidIsNearTheStandardLibrary) {
  auto values = wide_range();
  const auto inputs = values;
  kernels().sigmoid(values.data(), static_cast<std::int64_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double expected = sigmoid(inputs[i]);
    // Below e^−87 results are small, not exact.
    ASSERT_NEAR(values[i], expected, 4e-7 * expected + 1e-38) << inputs[i];
  }
  for (const auto n : kLengths) {
    std::vector<float> some(static_cast<std::size_t>(n) + 1, -2.0F);
    some[0] = kNaN;
    kernels().sigmoid(some.data(), n);
    EXPECT_TRUE(std::isnan(some[0]));
    for (std::size_t i = 1; i < static_cast<std::size_t>(n); ++i) {
      ASSERT_NEAR(some[i], sigmoid(-2.0), 1e-7);
    }
    EXPECT_EQ(some.back(), -2.0F);
  }
}

TEST_P(ElementKernelTest, SoftmaxIsNearTheStandardLibrary) {
  for (const auto n : kLengths) {
    for (const float scale : {1.0F, 30.0F, 1e30F}) {
      std::vector<float> values(static_cast<std::size_t>(n) + 1, 5.0F);
      Random random(static_cast<std::uint64_t>(n));
      for (float& v : values) v = scale * random.uniform();
      const auto inputs = values;
      kernels().softmax(values.data(), n);
      const double most = *std::max_element(inputs.begin(), inputs.end() - 1);
      double total = 0.0;
      for (std::int64_t i = 0; i < n; ++i) {
        total += std::exp(inputs[static_cast<std::size_t>(i)] - most);
      }
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
        const double expected = std::exp(inputs[i] - most) / total;
        // The argument itself is rounded before the exponential.
        ASSERT_NEAR(values[i], expected, (4e-7 + 1e-7 * (most - inputs[i])) * expected + 2e-38)
            << n;
      }
      EXPECT_EQ(values.back(), inputs.back());
    }
  }
}

TEST_P(ElementKernelTest, AllFiniteSeesEveryPlace) {
  for (const auto n : kLengths) {
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> values(size + 1, std::numeric_limits<float>::max());
    values.back() = kNaN;  // beyond the end
    EXPECT_TRUE(kernels().all_finite(values.data(), n));
    for (std::size_t i = 0; i < size; ++i) {
      for (const float bad : {kNaN, -kNaN, kInfinity, -kInfinity}) {
        const float before = std::exchange(values[i], bad);
        ASSERT_FALSE(kernels().all_finite(values.data(), n)) << i << " of " << n;
        values[i] = before;
      }
    }
  }
}

TEST_P(ElementKernelTest, ArgmaxTakesTheLowestOfEquals) {
  for (const auto n : kLengths) {
    const auto size = static_cast<std::size_t>(n);
    for (std::size_t first = 0; first < size; ++first) {
      std::vector<float> values(size + 1, -3.0F);
      values.back() = 9.0F;  // beyond the end
      for (std::size_t i = first; i < size; i += 5) values[i] = -1.0F;
      ASSERT_EQ(kernels().argmax(values.data(), n), static_cast<std::int64_t>(first));
    }
    const std::vector<float> none(size, -kInfinity);
    EXPECT_EQ(kernels().argmax(none.data(), n), 0);
  }
}

TEST_P(ElementKernelTest, AddAndAddRows) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto n : kLengths) {
      const Tensor rows = Random(1).tensor({4, n + 2}, dtype);
      const auto row_values = testing::doubles_of(rows.view());
      const Tensor from = Random(2).tensor({n}, Dtype::f32);
      const float scale[]{0.5F, -2.0F, 4.0F};  // exact, so that sums are those of floats in order
      Tensor sums = Tensor::zeros({n + 1}, Dtype::f32);
      typed(dtype).add_rows(sums.span<float>().data(), rows.data(), 3, n + 2, n, scale);
      for (std::int64_t i = 0; i < n; ++i) {
        float expected = 0.0F;
        for (std::int64_t r = 0; r < 3; ++r) {
          expected += scale[r] * static_cast<float>(row_values.row(r)[i]);
        }
        ASSERT_EQ(sums.span<float>()[static_cast<std::size_t>(i)], expected);
      }
      EXPECT_EQ(sums.span<float>().back(), 0.0F);
      typed(dtype).add_rows(sums.span<float>().data(), rows.data(), 0, n + 2, n, nullptr);

      Tensor to = rows.clone();
      typed(dtype).add(to.data(), from.span<float>().data(), n);
      const auto added = testing::doubles_of(to.view());
      for (std::int64_t i = 0; i < n + 2; ++i) {
        const auto before = static_cast<float>(row_values.values[static_cast<std::size_t>(i)]);
        const float sum = i < n ? before + from.span<float>()[static_cast<std::size_t>(i)] : before;
        const float expected = dtype == Dtype::f32 ? sum : to_float(to_bfloat16(sum));
        ASSERT_EQ(added.values[static_cast<std::size_t>(i)], expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, ElementKernelTest,
                         ::testing::ValuesIn(element_kernels_of_this_cpu()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace switchyard::cpu::elements_test
