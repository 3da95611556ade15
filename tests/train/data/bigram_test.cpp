// SPDX-License-Identifier: Apache-2.0
#include "data/bigram.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>

namespace switchyard::train::bigram_test {
namespace {

using Windows = std::array<std::string_view, 2>;

// In "aab", a occurs twice and b once; after a come a and b once each, and after b nothing.
TEST(BigramLoss, EqualsTheValueComputedByHand) {
  const double single_a = 3.0 / 259.0;
  const double single_b = 2.0 / 259.0;
  const double b_after_a = (1.0 + 8.0 * single_b) / 10.0;
  const double a_after_b = single_a;
  const double x_after_a = 8.0 / 259.0 / 10.0;
  EXPECT_NEAR(bigram_loss("aab", Windows{"aba", "ax"}),
              -(std::log(b_after_a) + std::log(a_after_b) + std::log(x_after_a)) / 3.0, 1e-12);
}

TEST(BigramLoss, AllBytesHaveProbabilities) {
  const std::string training = "\xff\x80 bytes above 127 \xff\x80";
  for (const char before : {'\xff', ' ', 'q'}) {
    double sum = 0.0;
    for (int c = 0; c < 256; ++c) {
      const std::string window{before, static_cast<char>(c)};
      sum += std::exp(-bigram_loss(training, std::array<std::string_view, 1>{window}));
    }
    EXPECT_NEAR(sum, 1.0, 1e-9);
  }
}

}  // namespace
}  // namespace switchyard::train::bigram_test
