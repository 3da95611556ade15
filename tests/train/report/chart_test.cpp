// SPDX-License-Identifier: Apache-2.0
#include "report/chart.h"

#include <gtest/gtest.h>

#include <limits>

#include "train/report/markup.h"

namespace switchyard::train::chart_test {
namespace {

using testing::markup_of;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

testing::Markup drawn(const Series& points, bool has_dots = false,
                      const std::vector<Level>& levels = {}) {
  const auto html = chart_html({.title = "a \"title\"",
                                .lines = {{"a <name>", "mean", points, has_dots}},
                                .levels = levels,
                                .across = Axis::whole({1, 5}, 4),
                                .up = Axis::rounded({0.0, 4.0}, 4)});
  return markup_of("<!DOCTYPE html>" + html);
}

const testing::Element* path_with(const testing::Markup& markup, const std::string& style) {
  for (const auto& element : markup.elements) {
    const auto found = element.attributes.find("class");
    if (found != element.attributes.end() && found->second == style) return &element;
  }
  return nullptr;
}

TEST(ReportChart, ALineGoesThroughItsPoints) {
  const auto markup = drawn({{1, 0.0}, {3, 4.0}, {5, 1.0}});
  EXPECT_EQ(markup.problem, "");
  const auto* line = path_with(markup, "line mean");
  ASSERT_NE(line, nullptr);
  EXPECT_EQ(line->attributes.at("d"), "M0 1000L500 0L1000 750");
  EXPECT_EQ(line->attributes.at("data-x"), "1 3 5");
  EXPECT_EQ(line->attributes.at("data-y"), "0 4 1");
  EXPECT_EQ(line->attributes.at("data-name"), "a &lt;name&gt;");
}

TEST(ReportChart, GapsPartALineAndOnePointIsADot) {
  const auto markup = drawn({{1, 0.0}, {2, kNan}, {3, 4.0}, {4, 4.0}, {5, kInfinity}});
  const auto* line = path_with(markup, "line mean");
  ASSERT_NE(line, nullptr);
  EXPECT_EQ(line->attributes.at("d"), "M0 1000h0M500 0L750 0");
  EXPECT_EQ(line->attributes.at("data-x"), "1 3 4");
  EXPECT_EQ(path_with(drawn({{3, 4.0}}), "line mean")->attributes.at("d"), "M500 0h0");
}

TEST(ReportChart, DotsLevelsAndLabels) {
  const auto markup =
      drawn({{1, 0.0}, {2, kNan}, {5, 2.0}}, true, {{"a & b", 3.0}, {"none", kNan}});
  EXPECT_EQ(markup.problem, "");
  EXPECT_EQ(path_with(markup, "dots mean")->attributes.at("d"), "M0 1000h0M1000 500h0");
  EXPECT_EQ(path_with(markup, "level")->attributes.at("d"), "M0 250H1000");
  EXPECT_EQ(path_with(markup, "level-label")->attributes.at("style"), "top:25.00%");
  EXPECT_NE(markup.text.find("a &amp; b"), std::string::npos);
  EXPECT_EQ(markup.text.find("none"), std::string::npos);
}

TEST(ReportChart, SpikesMakeTheAxisLogarithmic) {
  const auto ends = [](const Series& points) {
    return upward_axis({{"", "", points}}, {}, 4).interval();
  };
  EXPECT_EQ(ends({{1, 5.5}, {2, 2.0}, {3, 1.6}}).low, 1.0);
  EXPECT_EQ(ends({{1, 2.0}, {2, 1.0}, {3, 1e6}, {4, 1.0}, {5, 1.0}}).high, 1e6);
  EXPECT_EQ(ends({{1, 2.0}, {2, 1.0}, {3, 1e6}, {4, 1.0}, {5, 1.0}}).low, 1.0);
  EXPECT_EQ(ends({{1, 2.0}, {2, 0.0}, {3, 1e6}, {4, 1.0}}).low, 0.0);  // not of zeros
  EXPECT_EQ(ends({{1, kNan}}).high, 1.0);
  EXPECT_EQ(upward_axis({{"", "", {{1, 1.0}}}}, {{"", 3.0}}, 4).interval().high, 3.0);
}

}  // namespace
}  // namespace switchyard::train::chart_test
