// SPDX-License-Identifier: Apache-2.0
// Slotting on every device, against plain loops over one assignment after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "support/device/device_layout.h"

namespace switchyard::slots_contract_test {
namespace {

using testing::Counted;
using testing::deal;
using testing::index;
using testing::Ints;
using testing::Laid;
using testing::LayoutInput;
using testing::Random;
using testing::random_counts;
using testing::values;
using testing::Words;

class PlanSlotsContract : public testing::DeviceLayout {
 protected:
  struct Assigned {
    Ints slots, targets, sources;
    Ints places = {}, told_sources = {};  // where tokens cross once
  };
  Assigned assign(const Tensor& ids, const Ints& owners, const Counted& counted, const Laid& laid,
                  const std::optional<TensorView>& row_sources = {}) const {
    const auto count = std::ssize(counted.positions);
    const Tensor device_ids = put(ids);
    const Tensor device_owners = put_all(owners);
    const Tensor expert_offsets = put_all(laid.expert_offsets);
    const Tensor rows_before = put_all(laid.rows_before);
    const Tensor kept_rows = put_all(laid.kept_rows);
    const Tensor source_offsets = put_all(laid.source_offsets);
    const bool cross_once = !laid.token_offsets.empty();
    const Tensor positions = put_all(counted.positions);
    const Tensor token_positions = put_all(counted.token_positions);
    const Tensor token_offsets = put_all(laid.token_offsets);
    Tensor slots = put_all(counted.positions);
    Tensor targets = poisoned(count, Dtype::i32);
    Tensor sources = poisoned(count, Dtype::i32);
    Tensor places = poisoned(count, Dtype::i32);
    Tensor told_sources = poisoned(count, Dtype::i32);
    AssignSlots args{.expert_ids = device_ids,
                     .owners = device_owners,
                     .expert_offsets = expert_offsets,
                     .rows_before = rows_before,
                     .kept_rows = kept_rows,
                     .source_offsets = source_offsets,
                     .positions = cross_once ? positions.view() : slots.view(),
                     .slots = slots,
                     .target_ranks = targets,
                     .sources = sources,
                     .row_sources = row_sources};
    if (cross_once) {
      args.sent = SentTokens{.positions = token_positions,
                             .offsets = token_offsets,
                             .places = places,
                             .sources = told_sources};
    }
    backend_of(device).assign_slots(args);
    return {values<std::int32_t>(get(slots)), values<std::int32_t>(get(targets)),
            values<std::int32_t>(get(sources)), values<std::int32_t>(get(places)),
            values<std::int32_t>(get(told_sources))};
  }

  void expect_tokens_cross_once(int num_ranks, std::int64_t top_k, const Sizing& sizing) const;
};
SWITCHYARD_ON_DEVICES(PlanSlotsContract);

// One rank of several, whose counts are made up but for its own.
TEST_P(PlanSlotsContract, SlotsAndSourcesFollowTheLayout) {
  for (const bool bounded : {false, true}) {
    constexpr int kExperts = 48;
    constexpr int kRanks = 3;
    constexpr std::int64_t kTopK = 5;
    Tensor ids = Random(9).expert_ids(
        {.num_tokens = 1500, .top_k = kTopK, .num_experts = kExperts, .skew = 0.4, .none = 0.1});
    ids.span<std::int32_t>()[11] = kExperts;
    const Ints owners = deal(kExperts, kRanks);
    const Counted counted = count({.ids = ids, .owners = owners, .num_ranks = kRanks});
    LayoutInput in{random_counts(kRanks, kExperts), owners, kRanks, 1, 8, Sizing::exact()};
    std::ranges::copy(counted.counts, in.counts.begin() + kExperts);
    if (bounded) in.sizing = Sizing::bounded(1600, Overflow::drop);
    const Laid laid = lay_out(in);

    const auto [slots, targets, sources, places, told] = assign(ids, owners, counted, laid);
    Ints expected_slots;
    Ints expected_targets;
    Ints expected_sources(index(laid.source_offsets.back()));
    for (std::size_t i = 0; i < counted.positions.size(); ++i) {
      const auto position = counted.positions[i];
      const auto e = position < 0 ? 0 : index(ids.span<std::int32_t>()[i]);
      const auto row = laid.rows_before[e] + position;
      const bool fits = position >= 0 && row < laid.kept_rows[e];
      expected_slots.push_back(fits ? laid.expert_offsets[e] + row : -1);
      expected_targets.push_back(position < 0 ? -1 : owners[e]);
      if (position < 0) continue;
      expected_sources[index(laid.source_offsets[e] + position)] = static_cast<std::int32_t>(i);
    }
    EXPECT_TRUE(slots == expected_slots);
    EXPECT_TRUE(targets == expected_targets);
    Ints used = sources;
    used.resize(expected_sources.size());
    EXPECT_TRUE(used == expected_sources);
    EXPECT_EQ(bounded,
              std::ranges::count(expected_slots, -1) > std::ranges::count(expected_targets, -1));
  }
}

// A rank that is alone. What is no assignment's row stays as it was.
TEST_P(PlanSlotsContract, RowSourcesNameTheAssignmentOfEverySlot) {
  constexpr int kExperts = 40;
  Tensor ids = Random(10).expert_ids(
      {.num_tokens = 700, .top_k = 4, .num_experts = kExperts, .skew = 0.4, .none = 0.1});
  ids.span<std::int32_t>()[5] = kExperts;
  const Ints owners = deal(kExperts, 1);
  const Counted counted = count({.ids = ids, .owners = owners});
  for (const std::int64_t alignment : {1, 8}) {
    for (const Sizing& sizing : {Sizing::exact(), Sizing::bounded(4000), Sizing::bounded(1600),
                                 Sizing::bounded(1600, Overflow::drop), Sizing::bounded(0)}) {
      const Laid laid = lay_out({counted.counts, owners, 1, 0, alignment, sizing});
      const auto capacity = sizing.is_bounded() ? sizing.capacity() : laid.row_offsets.back();
      Tensor row_sources = poisoned(capacity, Dtype::i32);
      Ints expected = values<std::int32_t>(get(row_sources));
      const Assigned assigned = assign(ids, owners, counted, laid, row_sources.view());
      for (std::size_t i = 0; i < assigned.slots.size(); ++i) {
        const auto slot = assigned.slots[i];
        if (slot >= 0) expected[index(slot)] = static_cast<std::int32_t>(i);
      }
      EXPECT_TRUE(values<std::int32_t>(get(row_sources)) == expected)
          << "alignment " << alignment << ", capacity " << capacity;
      EXPECT_EQ(std::ranges::count_if(assigned.slots, [](auto slot) { return slot >= 0; }),
                std::accumulate(laid.group_rows.begin(), laid.group_rows.end(), 0));
    }
  }
}

// All ranks of a group, with ids that are bad, none or picked already.
void PlanSlotsContract::expect_tokens_cross_once(int num_ranks, std::int64_t top_k,
                                                 const Sizing& sizing) const {
  SCOPED_TRACE(::testing::Message() << "ranks " << num_ranks << " K " << top_k << " capacity "
                                    << sizing.capacity() << "/" << sizing.token_capacity());
  constexpr int kExperts = 24;
  const Ints owners = deal(kExperts, num_ranks);
  LayoutInput in{
      .counts = {}, .owners = owners, .num_ranks = num_ranks, .alignment = 8, .sizing = sizing};
  std::vector<Tensor> ids;
  std::vector<Counted> counted;
  for (int s = 0; s < num_ranks; ++s) {
    Random random(static_cast<std::uint64_t>(s + 1));
    ids.push_back(Tensor({90 - 7 * s, top_k}, Dtype::i32));
    for (auto& id : ids.back().span<std::int32_t>())
      id = static_cast<std::int32_t>(random.below(30)) - 4;
    counted.push_back(count({.ids = ids.back(), .owners = owners, .num_ranks = num_ranks}));
    std::ranges::copy(counted.back().counts, std::back_inserter(in.counts));
    std::ranges::copy(counted.back().distinct_tokens, std::back_inserter(in.distinct_tokens));
  }

  using Token = std::pair<int, std::int64_t>;              // its rank and number
  std::map<std::pair<int, std::int64_t>, Token> received;  // by the rank and the place there
  std::set<std::pair<int, Token>> with_rows;
  std::vector<Assigned> assigned;
  Words layout;
  for (int s = 0; s < num_ranks; ++s) {
    in.rank = s;
    const Laid laid = lay_out(in);
    layout = laid.layout;
    assigned.push_back(assign(ids[index(s)], owners, counted[index(s)], laid));
    for (std::int64_t i = 0; i < std::ssize(assigned.back().slots); ++i) {
      const auto target = assigned.back().targets[index(i)];
      const auto place = assigned.back().places[index(i)];
      if (assigned.back().slots[index(i)] >= 0) with_rows.insert({target, {s, i / top_k}});
      if (place < 0) continue;
      EXPECT_LT(place, layout[index(needed_tokens_word(num_ranks, target))]);
      EXPECT_TRUE(received.try_emplace({target, place}, s, i / top_k).second);
    }
  }
  EXPECT_EQ(received.size(), with_rows.size());
  const auto first = layout.begin() + needed_tokens_word(num_ranks, 0);
  const auto needed = std::accumulate(first, first + num_ranks, std::int64_t{0});
  if (layout[kOverflowWord] == 0) {
    EXPECT_EQ(std::ssize(received), needed);
  }

  for (int s = 0; s < num_ranks; ++s) {
    const auto& [slots, targets, sources, places, told] = assigned[index(s)];
    std::set<std::pair<std::int64_t, std::int32_t>> sent;  // token and rank
    for (std::int64_t i = 0; i < std::ssize(slots); ++i) {
      const auto source = told[index(i)];
      EXPECT_EQ(source < 0, slots[index(i)] < 0);
      if (source < 0) {
        EXPECT_EQ(places[index(i)], -1);
        continue;
      }
      EXPECT_EQ(source % top_k, i % top_k);
      EXPECT_EQ(received.at({targets[index(i)], source / top_k}), Token(s, i / top_k));
      const bool is_first = sent.insert({i / top_k, targets[index(i)]}).second;
      EXPECT_EQ(places[index(i)], is_first ? source / top_k : -1);
    }
  }
}

TEST_P(PlanSlotsContract, TokensCrossOnceAndRowsNameThem) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    for (const std::int64_t top_k : {1, 2, 8, 40}) {
      for (const Sizing& sizing :
           {Sizing::exact(), Sizing::bounded(80, Overflow::drop, 10000), Sizing::bounded(48),
            Sizing::bounded(10000, Overflow::fail, 60)}) {
        expect_tokens_cross_once(num_ranks, top_k, sizing);
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::slots_contract_test
