// SPDX-License-Identifier: Apache-2.0
// Sums that find every bit that is wrong, however tensors are divided.
#include "checkpoints/content_sum.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "support/random.h"

namespace switchyard::train::content_sum_test {
namespace {

std::vector<std::byte> random_bytes(std::size_t count) {
  testing::Random random(1);
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random.below(256));
  return bytes;
}

TEST(ContentHash, EveryBitCounts) {
  for (const std::size_t count : {0U, 1U, 7U, 8U, 9U, 64U, 67U}) {
    auto bytes = random_bytes(count);
    std::set<std::uint64_t> seen{content_hash("w", bytes)};
    for (std::size_t bit = 0; bit < 8 * count; ++bit) {
      const auto mask = static_cast<std::byte>(1U << (bit % 8));
      bytes[bit / 8] ^= mask;
      seen.insert(content_hash("w", bytes));
      bytes[bit / 8] ^= mask;
    }
    EXPECT_EQ(seen.size(), 8 * count + 1);
  }
}

// The highest bit of two words: a product alone would lose both.
TEST(ContentHash, PairsOfBitsDoNotCancelOut) {
  auto bytes = random_bytes(64);
  const auto before = content_hash("w", bytes);
  for (std::size_t other = 15; other < 64; other += 8) {
    bytes[7] ^= std::byte{0x80};
    bytes[other] ^= std::byte{0x80};
    EXPECT_NE(content_hash("w", bytes), before);
    bytes[7] ^= std::byte{0x80};
    bytes[other] ^= std::byte{0x80};
  }
}

TEST(ContentHash, NameLengthAndOrderCount) {
  const std::vector<std::byte> zeros(16);
  const std::span<const std::byte> all(zeros);
  auto bytes = random_bytes(16);
  const auto forwards = content_hash("w", bytes);
  std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8);
  const std::set<std::uint64_t> seen{content_hash("v", all),
                                     content_hash("w", all),
                                     content_hash("w", all.first(15)),
                                     content_hash("w", all.first(8)),
                                     content_hash("w", {}),
                                     content_hash("", all),
                                     forwards,
                                     content_hash("w", bytes)};
  EXPECT_EQ(seen.size(), 8U);
}

}  // namespace
}  // namespace switchyard::train::content_sum_test
