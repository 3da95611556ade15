// SPDX-License-Identifier: Apache-2.0
#include "report/series.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace switchyard::train::series_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Series series_with(const std::vector<double>& values) {
  Series series;
  for (const double value : values) {
    series.push_back({static_cast<double>(series.size() + 1), value});
  }
  return series;
}

bool has(const Series& series, double step, double value) {
  return std::any_of(series.begin(), series.end(),
                     [&](const Point& p) { return p.step == step && p.value == value; });
}

TEST(ReportSeries, FewPointsStay) {
  EXPECT_TRUE(thinned({}, 10).empty());
  const auto series = series_with({3.0, kNan, 1.0});
  const auto thin = thinned(series, 3);
  ASSERT_EQ(thin.size(), 3U);
  EXPECT_TRUE(std::isnan(thin[1].value));
}

TEST(ReportSeries, ManyPointsKeepTheirExtremesAndOrder) {
  std::vector<double> values;
  for (int i = 0; i < 100'000; ++i) values.push_back(std::sin(i * 0.37));
  values[777] = 50.0;
  values[99'998] = -50.0;
  const auto thin = thinned(series_with(values), 1000);
  EXPECT_LE(thin.size(), 1000U);
  EXPECT_GE(thin.size(), 900U);
  EXPECT_TRUE(has(thin, 778, 50.0));
  EXPECT_TRUE(has(thin, 99'999, -50.0));
  EXPECT_TRUE(std::is_sorted(thin.begin(), thin.end(),
                             [](const Point& a, const Point& b) { return a.step < b.step; }));
}

TEST(ReportSeries, AStretchWithoutValuesIsAGap) {
  std::vector<double> values(1000, 1.0);
  std::fill(values.begin() + 400, values.end(), kNan);
  values[10] = kNan;  // beside others it is no gap
  const auto thin = thinned(series_with(values), 20);
  EXPECT_LE(thin.size(), 20U);
  const auto gap = std::find_if(thin.begin(), thin.end(),
                                [](const Point& p) { return !std::isfinite(p.value); });
  ASSERT_NE(gap, thin.end());
  EXPECT_EQ(gap->step, 401.0);
  EXPECT_TRUE(std::none_of(gap, thin.end(), [](const Point& p) { return std::isfinite(p.value); }));
}

TEST(ReportSeries, SmoothingIsAMeanAround) {
  const auto smooth = smoothed(series_with({1, 2, 9, 4, 5, 6, 7}), 5, 100);
  ASSERT_EQ(smooth.size(), 7U);
  EXPECT_DOUBLE_EQ(smooth[0].value, 1.0);
  EXPECT_DOUBLE_EQ(smooth[1].value, 4.0);         // of 1, 2, 9
  EXPECT_DOUBLE_EQ(smooth[2].value, 21.0 / 5.0);  // of 1 to 5
  EXPECT_DOUBLE_EQ(smooth[6].value, 7.0);
}

TEST(ReportSeries, SmoothingLeavesGapsAndSkipsThemInMeans) {
  const auto smooth = smoothed(series_with({1, kNan, 3, 5, kNan, 7}), 3, 100);
  EXPECT_TRUE(std::isnan(smooth[1].value));
  EXPECT_DOUBLE_EQ(smooth[2].value, 4.0);
  EXPECT_TRUE(smoothed({}, 3, 100).empty());
}

TEST(ReportSeries, SmoothingIsAtFewPlacesFromFirstToLast) {
  const auto smooth = smoothed(series_with(std::vector<double>(5000, 2.0)), 99, 50);
  ASSERT_EQ(smooth.size(), 50U);
  EXPECT_EQ(smooth.front().step, 1.0);
  EXPECT_EQ(smooth.back().step, 5000.0);
  EXPECT_DOUBLE_EQ(smooth[25].value, 2.0);
}

}  // namespace
}  // namespace switchyard::train::series_test
