// SPDX-License-Identifier: Apache-2.0
#include "report/numbers.h"

#include <gtest/gtest.h>

#include <limits>

namespace switchyard::train::numbers_test {
namespace {

TEST(ReportNumbers, Losses) {
  EXPECT_EQ(loss_text(1.6418), "1.642");
  EXPECT_EQ(loss_text(-0.5), "-0.500");
  EXPECT_EQ(loss_text(123456.0), "123456");
  EXPECT_EQ(loss_text(1e30), "1e+30");
}

TEST(ReportNumbers, Ratios) {
  EXPECT_EQ(ratio_text(1.154), "1.15");
  EXPECT_EQ(ratio_text(1e9), "1e+09");
}

TEST(ReportNumbers, WholeNumbers) {
  EXPECT_EQ(whole_text(0.0), "0");
  EXPECT_EQ(whole_text(999.4), "999");
  EXPECT_EQ(whole_text(1000.0), "1,000");
  EXPECT_EQ(whole_text(-1234567.0), "-1,234,567");
  EXPECT_EQ(whole_text(1e300), "1e+300");
}

TEST(ReportNumbers, Counts) {
  EXPECT_EQ(count_text(0.0), "0");
  EXPECT_EQ(count_text(999.0), "999");
  EXPECT_EQ(count_text(4096.0), "4,096");
  EXPECT_EQ(count_text(9999.0), "9,999");
  EXPECT_EQ(count_text(9999.6), "10 k");
  EXPECT_EQ(count_text(999'600.0), "1 M");
  EXPECT_EQ(count_text(1'638'400.0), "1.64 M");
  EXPECT_EQ(count_text(9.2e18), "9200 P");
}

TEST(ReportNumbers, Bytes) {
  EXPECT_EQ(bytes_text(12.0), "12 B");
  EXPECT_EQ(bytes_text(12'345'678.0), "12.3 MB");
  EXPECT_EQ(bytes_text(999'999.0), "1 MB");
}

TEST(ReportNumbers, Durations) {
  EXPECT_EQ(duration_text(0.0), "0 ms");
  EXPECT_EQ(duration_text(0.0004), "0.4 ms");
  EXPECT_EQ(duration_text(0.82), "820 ms");
  EXPECT_EQ(duration_text(9.44), "9.44 s");
  EXPECT_EQ(duration_text(59.6), "1 min 0 s");
  EXPECT_EQ(duration_text(118.0), "1 min 58 s");
  EXPECT_EQ(duration_text(7385.0), "2 h 3 min");
  EXPECT_EQ(duration_text(1e20), "1e+20 s");
  EXPECT_EQ(duration_text(-1e308), "-1e+308 s");
}

TEST(ReportNumbers, Times) {
  EXPECT_EQ(time_text(1'795'000'000), "2026-11-18 11:06 UTC");
  EXPECT_EQ(time_text(-1), "1969-12-31 23:59 UTC");
  EXPECT_EQ(time_text(0), "–");
  EXPECT_EQ(time_text(std::numeric_limits<std::int64_t>::max()), "–");
  EXPECT_EQ(time_text(std::numeric_limits<std::int64_t>::min()), "–");
}

TEST(ReportNumbers, SharesAndOthers) {
  EXPECT_EQ(percent_text(0.1234), "12.3 %");
  EXPECT_EQ(short_text(0.012444), "0.0124");
  EXPECT_EQ(short_text(47.24), "47.2");
  EXPECT_EQ(plain_text(3.14159265), "3.1416");
}

TEST(ReportNumbers, WhatIsNotFiniteIsADash) {
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity()}) {
    for (const auto text : {loss_text, ratio_text, whole_text, count_text, bytes_text,
                            duration_text, short_text, percent_text}) {
      EXPECT_EQ(text(value), "–");
    }
    EXPECT_EQ(plain_text(value), "0");
  }
}

}  // namespace
}  // namespace switchyard::train::numbers_test
