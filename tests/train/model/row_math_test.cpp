// SPDX-License-Identifier: Apache-2.0
#include "model/row_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/random.h"

namespace switchyard::train::row_math_test {
namespace {

std::vector<float> random_row(std::int64_t n, std::uint64_t seed) {
  testing::Random random(seed);
  std::vector<float> row;
  for (std::int64_t i = 0; i < n; ++i) row.push_back(random.uniform());
  return row;
}

TEST(RowMath, ExponentialsAreExactToTwoUnits) {
  for (int i = 0; i < 87000; ++i) {
    const float x = -0.001F * static_cast<float>(i);
    const double expected = std::exp(static_cast<double>(x));
    ASSERT_NEAR(exp_of_negative(x) / expected, 1.0, 0x1p-22) << x;
  }
  EXPECT_EQ(exp_of_negative(0.0F), 1.0F);
}

TEST(RowMath, ExponentialsEndInZeroAndKeepNaN) {
  EXPECT_EQ(exp_of_negative(-87.1F), 0.0F);
  EXPECT_EQ(exp_of_negative(-1e30F), 0.0F);
  EXPECT_EQ(exp_of_negative(-std::numeric_limits<float>::infinity()), 0.0F);
  EXPECT_TRUE(std::isnan(exp_of_negative(std::numeric_limits<float>::quiet_NaN())));
}

// Lengths with and without a rest after the lanes.
TEST(RowMath, ReducesRowsOfEveryLength) {
  for (std::int64_t n = 1; n <= 70; ++n) {
    const auto a = random_row(n, 1);
    const auto b = random_row(n, 2);
    const auto c = random_row(n, 3);
    double sum = 0.0;
    double dot = 0.0;
    double dot_of_three = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      sum += a[i];
      dot += static_cast<double>(a[i]) * b[i];
      dot_of_three += static_cast<double>(a[i]) * b[i] * c[i];
    }
    EXPECT_NEAR(sum_of(a.data(), n), sum, 1e-5);
    EXPECT_NEAR(dot_of(a.data(), b.data(), n), dot, 1e-5);
    EXPECT_NEAR(dot_of(a.data(), b.data(), c.data(), n), dot_of_three, 1e-5);
    EXPECT_EQ(max_of(a.data(), n), *std::max_element(a.begin(), a.end()));
  }
}

TEST(RowMath, ExpRowIsRelativeToTheLargest) {
  for (const std::int64_t n : {1, 5, 16, 37}) {
    auto row = random_row(n, 1);
    const auto before = row;
    const auto exps = exp_row(row.data(), n, 3.0F);
    EXPECT_EQ(exps.largest, *std::max_element(before.begin(), before.end()));
    double sum = 0.0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      EXPECT_NEAR(row[i], std::exp(3.0 * (before[i] - exps.largest)), 1e-6);
      sum += row[i];
    }
    EXPECT_NEAR(exps.sum, sum, 1e-5);
  }
}

}  // namespace
}  // namespace switchyard::train::row_math_test
