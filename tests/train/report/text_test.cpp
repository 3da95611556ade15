// SPDX-License-Identifier: Apache-2.0
#include "report/text.h"

#include <gtest/gtest.h>

namespace switchyard::train::text_test {
namespace {

TEST(ReportText, WhatHtmlWouldReadIsEscaped) {
  EXPECT_EQ(escaped("<script>alert('a' & \"b\")</script>"),
            "&lt;script&gt;alert(&#39;a&#39; &amp; &quot;b&quot;)&lt;/script&gt;");
}

TEST(ReportText, Utf8Stays) {
  for (const char* text : {"", "plain\ttext\n", "caf\u00e9", "\u0800\ud7ff\ue000\uffff",
                           "\U00010000 \U0010ffff", "\u00a0"}) {
    EXPECT_EQ(escaped(text), text);
  }
}

TEST(ReportText, ControlsAreVisible) {
  EXPECT_EQ(escaped(std::string("\0\x01\r\x1b\x1f\x7f", 6)), "␀␁␍␛␟␡");
  EXPECT_EQ(escaped("a\xC2\x9B"
                    "b"),
            "a\uFFFD\uFFFDb");  // U+009B, which terminals obey
}

// As the Unicode standard recommends: one mark for what could have begun a character.
TEST(ReportText, WhatIsNotUtf8IsMarked) {
  const std::string mark = "\uFFFD";
  EXPECT_EQ(escaped("\xFF\xFE"), mark + mark);
  EXPECT_EQ(escaped("\x80"), mark);
  EXPECT_EQ(escaped("\xC0\xAF"), mark + mark);                        // longer than need be
  EXPECT_EQ(escaped("\xE0\x9F\xBF"), mark + mark + mark);             // likewise
  EXPECT_EQ(escaped("\xED\xA0\x80"), mark + mark + mark);             // half of a pair
  EXPECT_EQ(escaped("\xF4\x90\x80\x80"), mark + mark + mark + mark);  // beyond U+10FFFF
  EXPECT_EQ(escaped("\xE2\x90<"), mark + "&lt;");                     // cut short by another
  EXPECT_EQ(escaped("x\xF0\x9F\x98"), "x" + mark);                    // cut short by the end
  EXPECT_EQ(escaped("\xE2\x90\xE2\x90\x80"), mark + "␀");
}

}  // namespace
}  // namespace switchyard::train::text_test
