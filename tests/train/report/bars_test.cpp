// SPDX-License-Identifier: Apache-2.0
#include "report/bars.h"

#include <gtest/gtest.h>

#include <cmath>

#include "train/report/markup.h"

namespace switchyard::train::bars_test {
namespace {

TEST(ReportBars, TheLongestComesFirstAndFillsTheWidth) {
  const auto html = bars_html({.name_title = "What",
                               .first_title = "one",
                               .second_title = "two",
                               .bars = {{"short", 1.0, "1", "a"},
                                        {"<long>", 4.0, "4", "b"},
                                        {"none", std::nan(""), "–", "c"},
                                        {"less", -3.0, "-3", "d"}}});
  const auto markup = testing::markup_of("<!DOCTYPE html>" + html);
  EXPECT_EQ(markup.problem, "");
  EXPECT_LT(html.find("&lt;long&gt;"), html.find("short"));
  std::vector<std::string> widths;
  for (const auto& element : markup.elements) {
    if (element.name == "i") widths.push_back(element.attributes.at("style"));
  }
  EXPECT_EQ(widths, (std::vector<std::string>{"width:100.00%", "width:25.00%", "width:0.00%",
                                              "width:0.00%"}));
}

TEST(ReportBars, EmptyBarsDoNotDivideByZero) {
  const auto html = bars_html({.name_title = "What",
                               .first_title = "one",
                               .second_title = "two",
                               .bars = {{"a", 0.0, "0", "0"}}});
  EXPECT_NE(html.find("width:0.00%"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::train::bars_test
