// SPDX-License-Identifier: Apache-2.0
#include "core/in_quotes.h"

#include <gtest/gtest.h>

#include <string>

namespace switchyard::in_quotes_test {
namespace {

std::string quoted(const std::string& text) { return fmt::format("{}", in_quotes(text)); }

TEST(InQuotes, ShowsPrintableCharacters) {
  EXPECT_EQ(quoted(""), "''");
  EXPECT_EQ(quoted("größe 専門家 🙂\u00a0"), "'größe 専門家 🙂\u00a0'");
  EXPECT_EQ(quoted("\u200b\u2029\u202f\u2065\u206a"), "'\u200b\u2029\u202f\u2065\u206a'");
}

TEST(InQuotes, EscapesControlCharacters) {
  EXPECT_EQ(quoted("a\x1b[2J\x7f\n"), R"('a\x1b[2J\x7f\x0a')");
  EXPECT_EQ(quoted("\u0080\u009b31m\u009f"), R"('\xc2\x80\xc2\x9b31m\xc2\x9f')");
  EXPECT_EQ(quoted("\u202a\u202e"), R"('\xe2\x80\xaa\xe2\x80\xae')");
  EXPECT_EQ(quoted("\u2066\u2069"), R"('\xe2\x81\xa6\xe2\x81\xa9')");
}

TEST(InQuotes, EscapesInvalidUtf8) {
  EXPECT_EQ(quoted("a\x9b z"), R"('a\x9b z')");
  EXPECT_EQ(quoted("\xc0\xff\xe2\x80"), R"('\xc0\xff\xe2\x80')");
  EXPECT_EQ(quoted("\xe2z"), R"('\xe2z')");
}

TEST(InQuotes, ShortensBetweenCharacters) {
  const std::string most(kMaxInQuotes, 'x');
  EXPECT_EQ(quoted(most), "'" + most + "'");
  EXPECT_EQ(quoted(most.substr(1) + "ü"), "'" + most.substr(1) + "…'");
}

}  // namespace
}  // namespace switchyard::in_quotes_test
