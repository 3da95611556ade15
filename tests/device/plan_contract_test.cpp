// Laying out and slotting on every device, against plain loops over one expert and assignment after
// the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "support/device/device_tables.h"
#include "support/device/plain_layout.h"
#include "support/random.h"

namespace switchyard::plan_contract_test {
namespace {

using testing::Counted;
using testing::deal;
using testing::index;
using testing::Ints;
using testing::Laid;
using testing::lay_out_plainly;
using testing::LayoutInput;
using testing::no_problems;
using testing::Random;
using testing::round_up;
using testing::values;
using testing::Words;

class PlanContract : public testing::DeviceTables {
 protected:
  Laid lay_out(const LayoutInput& in, const TensorView* step = nullptr,
               const Words& met = no_problems()) const {
    const auto num_experts = std::ssize(in.owners);
    Ints by_rank;
    Ints offsets{0};
    for (int r = 0; r < in.num_ranks; ++r) {
      for (const auto e : in.experts_of(r)) by_rank.push_back(e);
      offsets.push_back(static_cast<std::int32_t>(by_rank.size()));
    }
    const auto num_local = std::ssize(in.experts_of(in.rank));
    const Tensor counts = put_rows(in, in.counts);
    const Tensor distinct_tokens = put_rows(in, in.distinct_tokens);
    const Tensor must_agree = put_rows(in, in.must_agree);
    const Tensor owners = put_all(in.owners);
    const Tensor experts_by_rank = put_all(by_rank);
    const Tensor rank_offsets = put_all(offsets);
    const Tensor problems = step != nullptr ? put_rows(in, met) : Tensor();
    Tensor expert_offsets = poisoned(num_experts, Dtype::i32);
    Tensor rows_before = poisoned(num_experts, Dtype::i32);
    Tensor kept_rows = poisoned(num_experts, Dtype::i32);
    Tensor row_offsets = poisoned(num_local + 1, Dtype::i32);
    Tensor group_rows = poisoned(num_local, Dtype::i32);
    Tensor source_offsets = poisoned(num_experts + 1, Dtype::i32);
    Tensor layout = poisoned(layout_words(in.num_ranks), Dtype::i64);
    Tensor token_offsets = poisoned(in.distinct_tokens.empty() ? 0 : in.num_ranks, Dtype::i32);
    LayOut args{.counts = rows_of(in, counts),
                .owners = owners,
                .experts_by_rank = experts_by_rank,
                .rank_offsets = rank_offsets,
                .rank = in.rank,
                .alignment = in.alignment,
                .sizing = in.sizing,
                .expert_offsets = expert_offsets,
                .rows_before = rows_before,
                .kept_rows = kept_rows,
                .row_offsets = row_offsets,
                .group_rows = group_rows,
                .source_offsets = source_offsets,
                .layout = layout};
    if (!in.distinct_tokens.empty()) {
      args.distinct_tokens = rows_of(in, distinct_tokens);
      args.token_offsets = token_offsets;
    }
    if (!in.must_agree.empty()) args.must_agree = rows_of(in, must_agree);
    if (step != nullptr) args.problems = rows_of(in, problems);
    if (step != nullptr) args.step = *step;
    backend_of(device).lay_out(args);
    return {values<std::int32_t>(get(expert_offsets)), values<std::int32_t>(get(rows_before)),
            values<std::int32_t>(get(kept_rows)),      values<std::int32_t>(get(row_offsets)),
            values<std::int32_t>(get(group_rows)),     values<std::int32_t>(get(source_offsets)),
            values<std::int64_t>(get(layout)),         values<std::int32_t>(get(token_offsets))};
  }

  // A row a rank, and strangers behind each of them.
  template <typename T>
  Tensor put_rows(const LayoutInput& in, const std::vector<T>& all) const {
    const auto columns = std::ssize(all) / in.num_ranks;
    return put_apart(Tensor::from<T>({in.num_ranks, columns}, all), in.columns_apart);
  }
  static ConstTensorView rows_of(const LayoutInput& in, const Tensor& wide) {
    return narrow(wide, {wide.rows(), wide.shape()[1] - in.columns_apart});
  }

  void expect_laid_out(const LayoutInput& in) const {
    SCOPED_TRACE(::testing::Message()
                 << "E " << in.owners.size() << " ranks " << in.num_ranks << " rank " << in.rank
                 << " alignment " << in.alignment << " capacity " << in.sizing.capacity()
                 << (in.sizing.overflow() == Overflow::drop ? " drop" : ""));
    const Laid actual = lay_out(in);
    const Laid expected = lay_out_plainly(in);
    EXPECT_EQ(actual.expert_offsets, expected.expert_offsets);
    EXPECT_EQ(actual.rows_before, expected.rows_before);
    EXPECT_EQ(actual.kept_rows, expected.kept_rows);
    EXPECT_EQ(actual.row_offsets, expected.row_offsets);
    EXPECT_EQ(actual.group_rows, expected.group_rows);
    EXPECT_EQ(actual.source_offsets, expected.source_offsets);
    EXPECT_EQ(actual.layout, expected.layout);
    EXPECT_EQ(actual.token_offsets, expected.token_offsets);
  }

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

  // Few, many and no rows side by side.
  static Ints random_counts(int num_ranks, int num_experts) {
    Random random(static_cast<std::uint64_t>(num_ranks * 10000 + num_experts));
    Ints counts;
    for (int i = 0; i < num_ranks * num_experts; ++i) {
      const auto most = std::array{1, 4, 40}[index(random.below(3))];
      counts.push_back(static_cast<std::int32_t>(random.below(most)));
    }
    return counts;
  }
};
SWITCHYARD_ON_DEVICES(PlanContract);

TEST_P(PlanContract, GroupsLieOneBehindTheOther) {
  for (const int num_experts : {1, 3, 33, 128, 1500}) {
    for (const int num_ranks : {1, 3}) {
      for (const std::int64_t alignment : {1, 8, 12}) {
        const int rank = num_ranks - 1;
        const Ints counts = random_counts(num_ranks, num_experts);
        expect_laid_out(
            {counts, deal(num_experts, num_ranks), num_ranks, rank, alignment, Sizing::exact()});
      }
    }
  }
}

TEST_P(PlanContract, RowsThatDoNotFitAreCut) {
  for (const int num_experts : {1, 5, 64, 1100}) {
    for (const int num_ranks : {1, 4}) {
      for (const std::int64_t alignment : {1, 8}) {
        LayoutInput in{random_counts(num_ranks, num_experts),
                       deal(num_experts, num_ranks),
                       num_ranks,
                       num_ranks / 2,
                       alignment,
                       Sizing::exact()};
        const auto needed = in.rows_at(in.experts_of(0), 1000);
        for (const std::int64_t share : {0, 1, 3, 6, 10, 13}) {
          const auto capacity = round_up(needed * share / 10, alignment);
          for (const Overflow overflow : {Overflow::fail, Overflow::drop}) {
            in.sizing = Sizing::bounded(capacity, overflow);
            expect_laid_out(in);
          }
        }
      }
    }
  }
}

TEST_P(PlanContract, RowsBeyondThirtyTwoBitsAreSaidAndHaveNoRoom) {
  constexpr auto kMost = std::numeric_limits<std::int32_t>::max();
  const LayoutInput aligned{{1500000000, 600000000, 5}, deal(3, 1), 1, 0, 1 << 30, Sizing::exact()};
  const LayoutInput added{{kMost, 1, 3, 2}, deal(2, 2), 2, 1, 1, Sizing::exact()};
  for (const auto& [in, needed] : {std::pair(aligned, 4LL << 30), std::pair(added, kMost + 3LL)}) {
    const Laid laid = lay_out(in);
    EXPECT_EQ(laid.layout[index(needed_rows_word(in.num_ranks, 0))], needed);
    for (const Ints& rows : {laid.expert_offsets, laid.kept_rows, laid.rows_before,
                             laid.row_offsets, laid.group_rows}) {
      for (const auto value : rows) EXPECT_GE(value, 0);
    }
  }
}

TEST_P(PlanContract, AStepKeepsTheMostRowsAndTheFirstProblem) {
  const Words bad_logits{3, -1, -1, -1, 0};
  const Words bad_id{-1, 2, 1, 0, 1};
  for (const auto& [first, later] :
       {std::pair(bad_logits, bad_id), std::pair(bad_id, bad_logits)}) {
    Tensor step = put(Tensor::zeros({kStepWords}, Dtype::i64));
    const TensorView view = step.view();
    const auto add = [&](Ints counts, const Words& met) {
      const LayoutInput in{std::move(counts), deal(2, 1), 1, 0, 4, Sizing::bounded(8)};
      lay_out(in, &view, met);
      return values<std::int64_t>(get(step));
    };
    Words expected(index(kStepWords));
    expected[kStepMostNeeded] = 12;
    EXPECT_EQ(add({1, 5}, no_problems()), expected);
    expected[kStepHasProblem] = 1;
    std::ranges::copy(first, expected.begin() + kStepProblem);
    EXPECT_EQ(add({1, 1}, first), expected);
    expected[kStepMostNeeded] = 24;
    EXPECT_EQ(add({9, 9}, later), expected);
  }
}

TEST_P(PlanContract, AStepNamesTheFirstRankThatHasAProblem) {
  Tensor step = put(Tensor::zeros({kStepWords}, Dtype::i64));
  const TensorView view = step.view();
  const LayoutInput in{.counts = {1, 2, 3, 0, 0, 4},
                       .owners = deal(2, 3),
                       .num_ranks = 3,
                       .rank = 1,
                       .distinct_tokens = {1, 0, 2, 3, 1, 4, 0, 1, 3},
                       .columns_apart = 3};
  lay_out(in, &view, {-1, -1, -1, -1, 0, -1, 6, 0, 9, 0, 2, -1, -1, -1, 0});
  EXPECT_EQ(values<std::int64_t>(get(step)), (Words{6, 9, 1, 1, -1, 6, 0, 9, 0}));
}

// Counts that lie among others, as ranks tell them to each other.
TEST_P(PlanContract, ARankWithoutRoomForItsTokensKeepsNothing) {
  for (const int num_experts : {2, 9, 1100}) {
    for (const int num_ranks : {1, 2, 5}) {
      LayoutInput in{.counts = random_counts(num_ranks, num_experts),
                     .owners = deal(num_experts, num_ranks),
                     .num_ranks = num_ranks,
                     .rank = num_ranks - 1,
                     .alignment = 8,
                     .distinct_tokens = random_counts(num_ranks, num_ranks),
                     .columns_apart = num_experts % 4};
      in.distinct_tokens.back() = 50;  // more than other ranks have to receive
      expect_laid_out(in);
      const auto most = in.tokens_for(num_ranks - 1, num_ranks);
      for (const std::int64_t token_capacity : {std::int64_t{1}, most / 2, most - 1, most}) {
        for (const Overflow overflow : {Overflow::fail, Overflow::drop}) {
          for (const std::int64_t capacity : {8 * num_experts, 1000000}) {
            in.sizing = Sizing::bounded(capacity, overflow, token_capacity);
            expect_laid_out(in);
          }
        }
      }
      in.sizing = Sizing::bounded(most / 8 * 8);  // of tokens, too
      expect_laid_out(in);
    }
  }
}

TEST_P(PlanContract, TokensBeyondThirtyTwoBitsAreSaidAndHaveNoOffset) {
  constexpr auto kMost = std::numeric_limits<std::int32_t>::max();
  const Laid laid = lay_out({.counts = {1, 1, 1},
                             .owners = {0},
                             .num_ranks = 3,
                             .rank = 2,
                             .distinct_tokens = {kMost, 0, 0, kMost, 5, 0, 7, 1, 0}});
  EXPECT_EQ(laid.layout[index(needed_tokens_word(3, 0))], 2LL * kMost + 7);
  EXPECT_EQ(laid.token_offsets, (Ints{kMost, 5, 0}));
}

TEST_P(PlanContract, RanksThatDisagreeHaveNoRows) {
  for (const std::int64_t n : {1, 3, 70}) {
    LayoutInput in{.counts = random_counts(3, 7),
                   .owners = deal(7, 3),
                   .num_ranks = 3,
                   .rank = 1,
                   .sizing = Sizing::bounded(4),
                   .distinct_tokens = random_counts(3, 3),
                   .must_agree = Words(index(3 * n), 8),
                   .columns_apart = 2};
    EXPECT_EQ(lay_out(in).layout[index(kOverflowWord)], 1);
    expect_laid_out(in);
    for (const std::int64_t different : {n - 1, n, 3 * n - 1}) {
      std::ranges::fill(in.must_agree, 8);
      in.must_agree[index(different)] = -8;
      EXPECT_EQ(lay_out(in).layout, Words(index(layout_words(3))));
      expect_laid_out(in);
    }
  }
}

// One rank of several, whose counts are made up but for its own.
TEST_P(PlanContract, SlotsAndSourcesFollowTheLayout) {
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
TEST_P(PlanContract, RowSourcesNameTheAssignmentOfEverySlot) {
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
void PlanContract::expect_tokens_cross_once(int num_ranks, std::int64_t top_k,
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

TEST_P(PlanContract, TokensCrossOnceAndRowsNameThem) {
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
}  // namespace switchyard::plan_contract_test
