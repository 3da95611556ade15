// SPDX-License-Identifier: Apache-2.0
#include "model/rotary.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/compare.h"
#include "support/random.h"

namespace switchyard::train::rotary_test {
namespace {

using testing::Random;
using testing::same_bits;

constexpr std::int64_t kHeads = 3;
constexpr std::int64_t kSize = 6;  // of a head
constexpr std::int64_t kHidden = kHeads * kSize;
constexpr float kBase = 100.0F;

// By the definition, one pair at a time.
Tensor turned(const Tensor& x, const SequenceShard& shard) {
  Tensor result = x.clone();
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const auto position = static_cast<double>(shard.offset() + t % shard.count());
    for (std::int64_t pair = 0; pair < kHidden / 2; ++pair) {
      const auto i = pair % (kSize / 2);
      const auto low = static_cast<std::size_t>(t * kHidden + pair / (kSize / 2) * kSize + i);
      const auto high = low + kSize / 2;
      const double angle = position * std::pow(kBase, -2.0 * static_cast<double>(i) / kSize);
      const double a = x.span<float>()[low];
      const double b = x.span<float>()[high];
      result.span<float>()[low] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      result.span<float>()[high] = static_cast<float>(a * std::sin(angle) + b * std::cos(angle));
    }
  }
  return result;
}

TEST(Rotary, TurnsByPositionAndBack) {
  Compute compute(Device::cpu({.num_threads = 2}));
  for (const SequenceShard& shard : {SequenceShard(2, 5, 1, 0), SequenceShard(3, 3000, 2, 1),
                                     SequenceShard(2, 3, 4, 3), SequenceShard(0, 3, 1, 0)}) {
    const Tensor before = Random(1).tensor({shard.num_tokens(), kHidden}, Dtype::f32);
    Tensor x = before.clone();
    const Rotary rotary(shard, kSize, kBase);
    rotary.turn(compute, x, Turn::forward);
    EXPECT_TRUE(testing::within(x, turned(before, shard), 1e-6));
    rotary.turn(compute, x, Turn::back);
    EXPECT_TRUE(testing::within(x, before, 1e-6));
  }
}

TEST(Rotary, BitsDependNeitherOnThreadsNorOnCuts) {
  const std::int64_t length = 301;
  const Tensor before = Random(1).tensor({length, kHidden}, Dtype::f32);
  Compute one{Device()};
  Tensor whole = before.clone();
  Rotary(SequenceShard(1, length, 1, 0), kSize, kBase).turn(one, whole, Turn::forward);
  Compute three(Device::cpu({.num_threads = 3}));
  for (int rank = 0; rank < 2; ++rank) {
    const SequenceShard shard(1, length, 2, rank);
    Tensor x = before.clone();
    const auto piece = x.view().slice(shard.offset(), shard.offset() + shard.count());
    Rotary(shard, kSize, kBase).turn(three, piece, Turn::forward);
    EXPECT_TRUE(
        same_bits(piece, whole.view().slice(shard.offset(), shard.offset() + shard.count())));
  }
}

}  // namespace
}  // namespace switchyard::train::rotary_test
