// SPDX-License-Identifier: Apache-2.0
// Limiting picks on every device, against a plain choice for one expert after the other.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "support/device/device_tables.h"
#include "support/random.h"

namespace switchyard::capacity_contract_test {
namespace {

using testing::index;
using testing::Ints;
using testing::Random;
using testing::values;
using testing::Words;

struct Case {
  Tensor ids;
  Tensor weights;
  int num_experts = 1;
  Words tokens_of_sequences = {};
};

std::int64_t most_picks(const Case& c, double factor) {
  double tokens = 0.0;
  for (const auto of_sequence : c.tokens_of_sequences) tokens += static_cast<double>(of_sequence);
  const double picks = tokens * static_cast<double>(c.ids.shape()[1]);
  const double share = picks / c.num_experts * factor;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(std::min(share, picks))));
}

struct Kept {
  Ints ids;
  std::int64_t dropped = 0;
};

// A queue for every expert, or for every k of every expert, the best first.
Kept keep_plainly(const Case& c, const Capacity& capacity) {
  const auto top_k = c.ids.shape()[1];
  const auto weights = c.weights.span<float>();
  Kept kept{values<std::int32_t>(c.ids)};
  std::map<std::int64_t, std::vector<std::size_t>> queues;
  const bool by_weight = capacity.rule == CapacityRule::highest_weight;
  for (std::size_t i = 0; i < kept.ids.size(); ++i) {
    const std::int64_t e = kept.ids[i];
    if (e < 0 || e >= c.num_experts) continue;
    queues[by_weight ? e : e * top_k + static_cast<std::int64_t>(i) % top_k].push_back(i);
  }
  for (auto& [key, queue] : queues) {
    if (by_weight) {
      std::ranges::stable_sort(queue, [&](auto a, auto b) { return weights[a] > weights[b]; });
    }
    for (auto i = index(most_picks(c, capacity.factor)); i < queue.size(); ++i) {
      kept.ids[queue[i]] = -1;
      ++kept.dropped;
    }
  }
  return kept;
}

class CapacityContract : public testing::DeviceTables {
 protected:
  Kept limit(const Case& c, const Capacity& capacity) const {
    const std::int64_t width = 2 * c.num_experts + 1;
    const auto sequences = std::ssize(c.tokens_of_sequences);
    Tensor by_sequence({sequences, width}, Dtype::i64);
    testing::poison(by_sequence);
    for (std::int64_t s = 0; s < sequences; ++s) {
      by_sequence.span<std::int64_t>()[index((s + 1) * width - 1)] =
          c.tokens_of_sequences[index(s)];
    }
    Tensor sums_of_device = put(by_sequence);
    RouterSums sums;
    sums.num_experts = c.num_experts;
    sums.by_sequence = sums_of_device;
    const Tensor ids = put(c.ids);
    const Tensor weights = put(c.weights);
    Tensor unwritten(c.ids.shape(), Dtype::i32);
    testing::poison(unwritten);
    Tensor kept = put(unwritten);
    Tensor dropped = poisoned(1, Dtype::i64);
    backend_of(device).limit_picks({.expert_ids = ids,
                                    .weights = weights,
                                    .capacity = capacity,
                                    .sums = sums,
                                    .kept_ids = kept,
                                    .dropped = dropped});
    return {values<std::int32_t>(get(kept)), values<std::int64_t>(get(dropped))[0]};
  }

  void expect_limited(const Case& c) const {
    for (const auto rule : {CapacityRule::first_come, CapacityRule::highest_weight}) {
      for (const double factor : {1e-9, 0.3, 1.0, 1.25, 1e9}) {
        SCOPED_TRACE(::testing::Message()
                     << "T " << c.ids.rows() << " K " << c.ids.shape()[1] << " E " << c.num_experts
                     << " factor " << factor << " rule " << static_cast<int>(rule));
        const Kept actual = limit(c, {.factor = factor, .rule = rule});
        const Kept expected = keep_plainly(c, {.factor = factor, .rule = rule});
        EXPECT_EQ(actual.dropped, expected.dropped);
        EXPECT_TRUE(actual.ids == expected.ids);
      }
    }
  }
};
SWITCHYARD_ON_DEVICES(CapacityContract);

Case random_case(const Random::Picks& picks) {
  Random random(static_cast<std::uint64_t>(picks.num_tokens + picks.top_k));
  Tensor ids = random.expert_ids(picks);
  Tensor weights = random.tensor({picks.num_tokens, picks.top_k}, Dtype::f32);
  const auto half = picks.num_tokens / 2;
  return {
      std::move(ids), std::move(weights), picks.num_experts, {half, picks.num_tokens - half, 0}};
}

TEST_P(CapacityContract, KeepsWhatThereIsRoomFor) {
  const std::vector<Random::Picks> sizes{
      {0, 2, 4},   {1, 1, 1},         {7, 3, 5, 0.5},  {2000, 8, 128, 1.0, 0.1}, {5000, 2, 8, 0.6},
      {600, 1, 1}, {90, 40, 64, 0.4}, {3, 1024, 1100}, {100, 4, 2000, 1.0}};
  for (const auto& picks : sizes) expect_limited(random_case(picks));
}

TEST_P(CapacityContract, EqualWeightsKeepTheFirst) {
  Case c = random_case({.num_tokens = 1500, .top_k = 4, .num_experts = 6, .skew = 0.5});
  Random random(2);
  // Few values, both zeros and both signs among them.
  constexpr std::array kValues{0.25F, 0.0F, -0.0F, -0.5F, 0.25000003F, 1e-40F};
  for (auto& weight : c.weights.span<float>()) weight = kValues[index(random.below(6))];
  expect_limited(c);
}

TEST_P(CapacityContract, BadIdsStayAndCountNowhere) {
  Case c = random_case({.num_tokens = 800, .top_k = 3, .num_experts = 10});
  Random random(4);
  for (auto& id : c.ids.span<std::int32_t>()) {
    id = static_cast<std::int32_t>(random.below(14)) - 2;  // repeats of a token as well
  }
  expect_limited(c);
}

}  // namespace
}  // namespace switchyard::capacity_contract_test
