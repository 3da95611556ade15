// SPDX-License-Identifier: Apache-2.0
#include "report/png.h"

#include <gtest/gtest.h>

namespace switchyard::train::png_test {
namespace {

TEST(ReportPng, Base64) {  // the examples of RFC 4648
  const std::pair<const char*, const char*> examples[] = {{"", ""},
                                                          {"f", "Zg=="},
                                                          {"fo", "Zm8="},
                                                          {"foo", "Zm9v"},
                                                          {"foob", "Zm9vYg=="},
                                                          {"fooba", "Zm9vYmE="},
                                                          {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : examples) EXPECT_EQ(base64(bytes), text);
  EXPECT_EQ(base64("\xFB\xFF\xFE"), "+//+");
}

// Two rows of three pixels; the sums are those that zlib computes.
TEST(ReportPng, TheFileByteByByte) {
  const std::uint8_t pixels[] = {0, 1, 2, 2, 1, 0};
  const Colour palette[] = {{255, 0, 0, 255}, {0, 255, 0, 128}, {0, 0, 255, 0}};
  const auto file = png_file(pixels, 3, palette);
  const auto at = [&](std::size_t from, std::size_t length) { return file.substr(from, length); };
  EXPECT_EQ(at(0, 8), "\x89PNG\r\n\x1A\n");
  EXPECT_EQ(at(8, 25),
            std::string("\0\0\0\x0DIHDR\0\0\0\3\0\0\0\2\x08\x03\0\0\0\xAA\xAA\x96\x28", 25));
  EXPECT_EQ(at(33, 17), std::string("\0\0\0\x09PLTE\xFF\0\0\0\xFF\0\0\0\xFF", 17));
  EXPECT_EQ(at(54, 11), std::string("\0\0\0\x03tRNS\xFF\x80\0", 11));
  EXPECT_EQ(at(69, 36), std::string("\0\0\0\x18IDAT\x78\x01"
                                    "\0\4\0\xFB\xFF\0\0\1\2"
                                    "\1\4\0\xFB\xFF\0\2\1\0"
                                    "\0\x20\0\x07\xE1\x09\xD8\x49",
                                    36));
  EXPECT_EQ(at(file.size() - 12, 12), std::string("\0\0\0\0IEND\xAE\x42\x60\x82", 12));
}

}  // namespace
}  // namespace switchyard::train::png_test
