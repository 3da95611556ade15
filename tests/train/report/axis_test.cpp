// SPDX-License-Identifier: Apache-2.0
#include "report/axis.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

namespace switchyard::train::axis_test {
namespace {

using Labels = std::vector<std::string>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Labels labels_of(const Axis& axis) {
  Labels labels;
  for (const Tick& tick : axis.ticks()) labels.push_back(tick.label);
  return labels;
}

TEST(ReportAxis, IntervalsCoverFiniteValues) {
  const auto interval = interval_of(std::vector<double>{kNan, 3.0, -kInfinity, -1.5, kInfinity});
  EXPECT_EQ(interval.low, -1.5);
  EXPECT_EQ(interval.high, 3.0);
  for (const auto& none : {std::vector<double>{}, std::vector<double>{kNan}}) {
    EXPECT_EQ(interval_of(none).low, 0.0);
    EXPECT_EQ(interval_of(none).high, 1.0);
  }
  EXPECT_EQ(interval_of(std::vector<double>{-1e308, 1e308}).high, 1e100);
}

TEST(ReportAxis, EndsAtRoundTicks) {
  EXPECT_EQ(labels_of(Axis::rounded({1.6, 5.5}, 6)), (Labels{"1", "2", "3", "4", "5", "6"}));
  EXPECT_EQ(labels_of(Axis::rounded({0.0, 0.003}, 4)), (Labels{"0", "0.001", "0.002", "0.003"}));
  EXPECT_EQ(labels_of(Axis::rounded({0.0, 15200.0}, 4)),
            (Labels{"0", "5 k", "10 k", "15 k", "20 k"}));
  EXPECT_EQ(labels_of(Axis::rounded({-0.2, 0.2}, 4)), (Labels{"-0.2", "-0.1", "0", "0.1", "0.2"}));
  EXPECT_EQ(labels_of(Axis::rounded({0.0, 2e-5}, 2)), (Labels{"0", "1e-05", "2e-05"}));
}

// Steps of a run that was resumed are far from zero and near each other.
TEST(ReportAxis, TicksCanBeToldApart) {
  EXPECT_EQ(labels_of(Axis::whole({10'001, 10'200}, 4)),
            (Labels{"10,001", "10,050", "10,100", "10,150", "10,200"}));
  EXPECT_EQ(labels_of(Axis::whole({1, 400}, 6)), (Labels{"1", "100", "200", "300", "400"}));
  EXPECT_EQ(labels_of(Axis::whole({1, 100'000}, 6)),
            (Labels{"1", "20 k", "40 k", "60 k", "80 k", "100 k"}));
  EXPECT_EQ(labels_of(Axis::whole({1, 3}, 6)), (Labels{"1", "2", "3"}));
}

TEST(ReportAxis, OneStepIsInTheMiddle) {
  const auto axis = Axis::whole({7, 7}, 6);
  EXPECT_EQ(labels_of(axis), Labels{"7"});
  EXPECT_EQ(axis.place(7), 0.5);
}

TEST(ReportAxis, PowersOfTen) {
  EXPECT_EQ(labels_of(Axis::logarithmic({0.3, 70.0}, 4)), (Labels{"0.1", "1", "10", "100"}));
  const auto axis = Axis::logarithmic({1e-8, 1e8}, 4);
  EXPECT_EQ(axis.ticks().size(), 5U);
  EXPECT_DOUBLE_EQ(axis.place(1.0), 0.5);
  EXPECT_EQ(labels_of(Axis::logarithmic({10.0, 10.0}, 4)), (Labels{"10", "100"}));
}

TEST(ReportAxis, PlacesNeverLieBeyondTheAxis) {
  const auto axis = Axis::rounded({0.0, 10.0}, 5);
  EXPECT_DOUBLE_EQ(axis.place(2.5), 0.25);
  EXPECT_EQ(axis.place(-1e300), 0.0);
  EXPECT_EQ(axis.place(kInfinity), 1.0);
}

// For any interval there are few ticks, in order, with different labels, all on the axis.
TEST(ReportAxis, AnyIntervalHasSensibleTicks) {
  const Interval intervals[] = {
      {0.0, 0.0},    {5.0, 5.0},  {-3.0, -3.0}, {1e100, 1e100}, {-1e100, 1e100}, {1.0, 1.0 + 1e-12},
      {0.0, 1e-100}, {1e-9, 3.7}, {0.99, 1.01}, {-7e5, 12.0},   {1e14, 9e15},    {999.0, 1001.0}};
  for (const Interval& interval : intervals) {
    SCOPED_TRACE(::testing::Message() << interval.low << " to " << interval.high);
    const auto axis = Axis::rounded(interval, 5);
    const auto labels = labels_of(axis);
    EXPECT_GE(labels.size(), 2U);
    EXPECT_LE(labels.size(), 7U);
    EXPECT_EQ(std::set<std::string>(labels.begin(), labels.end()).size(), labels.size());
    EXPECT_LE(axis.interval().low, interval.low);
    EXPECT_GE(axis.interval().high, interval.high);
    for (const Tick& tick : axis.ticks()) {
      EXPECT_TRUE(std::isfinite(axis.place(tick.value))) << tick.label;
    }
  }
}

}  // namespace
}  // namespace switchyard::train::axis_test
