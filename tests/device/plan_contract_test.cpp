// Counting, laying out and slotting on every device, against plain loops over one assignment after
// the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/devices.h"
#include "support/random.h"

namespace switchyard {
namespace {

using testing::poison;
using testing::Random;
using Ints = std::vector<std::int32_t>;
using Words = std::vector<std::int64_t>;

constexpr std::array<std::int64_t, kProblemWords> kNoProblems{-1, -1, -1, -1, 0};

template <typename T>
std::vector<T> values(const Tensor& tensor) {
  return {tensor.span<T>().begin(), tensor.span<T>().end()};
}
std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
std::int64_t round_up(std::int64_t rows, std::int64_t to) { return (rows + to - 1) / to * to; }

// Experts are dealt out to ranks in turn.
Ints deal(int num_experts, int num_ranks) {
  Ints owners;
  for (int e = 0; e < num_experts; ++e) owners.push_back(e % num_ranks);
  return owners;
}

struct Counted {
  Ints counts;
  Ints distinct_tokens;
  Ints positions;
  Words problems;

  friend bool operator==(const Counted&, const Counted&) = default;
};

Counted count_plainly(const Tensor& ids, const Ints& owners, int num_ranks, bool allow_duplicates,
                      Words problems) {
  const auto num_experts = static_cast<std::int64_t>(owners.size());
  Counted all{Ints(owners.size()), Ints(index(num_ranks)), {}, std::move(problems)};
  const auto top_k = ids.shape()[1];
  for (std::int64_t t = 0; t < ids.rows(); ++t) {
    std::set<std::int32_t> experts;
    std::set<std::int32_t> ranks;
    for (std::int64_t k = 0; k < top_k; ++k) {
      const auto id = ids.span<std::int32_t>()[index(t * top_k + k)];
      const bool in_range = 0 <= id && id < num_experts;
      const bool repeats = in_range && !experts.insert(id).second;
      if (in_range && (allow_duplicates || !repeats)) {
        all.positions.push_back(all.counts[index(id)]++);
        if (ranks.insert(owners[index(id)]).second) ++all.distinct_tokens[index(owners[index(id)])];
        continue;
      }
      all.positions.push_back(-1);
      if (id == -1 || all.problems[kBadToken] >= 0) continue;
      all.problems = {all.problems[kNonFiniteToken], t, k, id, repeats ? 1 : 0};
    }
  }
  return all;
}

struct Problem {
  const Tensor& ids;
  Ints owners;
  int num_ranks = 1;
  bool allow_duplicates = false;
  std::int64_t columns_apart = 0;
  Words problems{kNoProblems.begin(), kNoProblems.end()};
};

class PlanContract : public testing::OnDevices {
 protected:
  template <typename T>
  Tensor put_all(const std::vector<T>& all) const {
    return put(Tensor::from<T>({static_cast<std::int64_t>(all.size())}, all));
  }
  Tensor poisoned(std::int64_t count, Dtype dtype) const {
    Tensor host({count}, dtype);
    poison(host);
    return put(host);
  }

  // The ids with as many strangers behind every row.
  Tensor put_apart(const Tensor& ids, std::int64_t columns) const {
    Tensor wide({ids.rows(), ids.shape()[1] + columns}, Dtype::i32);
    std::ranges::fill(wide.span<std::int32_t>(), 0);
    for (std::int64_t t = 0; t < ids.rows(); ++t) {
      std::copy_n(ids.view().row(t), ids.view().row_bytes(), wide.view().row(t));
    }
    return put(wide);
  }

  Counted count(const Problem& p) const {
    const Tensor wide = put_apart(p.ids, p.columns_apart);
    const Tensor owners = put_all(p.owners);
    Tensor counts = poisoned(std::ssize(p.owners), Dtype::i32);
    Tensor distinct = poisoned(p.num_ranks, Dtype::i32);
    Tensor positions = poisoned(p.ids.shape().num_elements(), Dtype::i32);
    Tensor problems = put_all(p.problems);
    const ConstTensorView view = wide.view();
    device.backend().count_assignments(
        {.expert_ids = ConstTensorView(view.data(), Dtype::i32, p.ids.shape(), view.row_stride(),
                                       view.owner(), view.memory()),
         .owners = owners,
         .allow_duplicates = p.allow_duplicates,
         .counts = counts,
         .distinct_tokens = distinct,
         .positions = positions,
         .problems = problems});
    return {values<std::int32_t>(get(counts)), values<std::int32_t>(get(distinct)),
            values<std::int32_t>(get(positions)), values<std::int64_t>(get(problems))};
  }

  void expect_counted(const Problem& p) const {
    const Counted actual = count(p);
    const Counted expected =
        count_plainly(p.ids, p.owners, p.num_ranks, p.allow_duplicates, p.problems);
    EXPECT_EQ(actual.counts, expected.counts);
    EXPECT_EQ(actual.distinct_tokens, expected.distinct_tokens);
    EXPECT_TRUE(actual.positions == expected.positions);
    EXPECT_EQ(actual.problems, expected.problems);
  }
};
SWITCHYARD_ON_DEVICES(PlanContract);

TEST_P(PlanContract, CountsInOrderAtEverySize) {
  struct Size {
    Random::Picks picks;
    int num_ranks;
  };
  const std::vector<Size> sizes{{{0, 2, 4}, 1},           {{1, 1, 1}, 1},
                                {{5, 3, 7, 0.5}, 2},      {{1000, 8, 128, 1.0, 0.1}, 1},
                                {{3000, 8, 128, 0.0}, 1}, {{333, 6, 64, 0.3, 0.5}, 4},
                                {{100, 17, 40, 0.5}, 3},  {{700, 32, 64, 0.2, 0.1}, 8},
                                {{40, 33, 50, 0.5}, 2},   {{9, 100, 300, 0.5, 0.1}, 5},
                                {{3, 1024, 1100}, 7},     {{4096, 8, 1024, 0.7}, 1},
                                {{9000, 1, 3, 0.9}, 3},   {{300, 2, 4096}, 16},
                                {{64, 4, 30000}, 2},      {{20, 1, 1, 0.0, 1.0}, 1}};
  for (const auto& [picks, num_ranks] : sizes) {
    SCOPED_TRACE(::testing::Message() << "T " << picks.num_tokens << " K " << picks.top_k << " E "
                                      << picks.num_experts << " ranks " << num_ranks);
    const Tensor ids = Random(3).expert_ids(picks);
    expect_counted(
        {.ids = ids, .owners = deal(picks.num_experts, num_ranks), .num_ranks = num_ranks});
  }
}

TEST_P(PlanContract, EveryTokenPicksOneExpert) {
  Tensor ids({5000, 1}, Dtype::i32);
  std::ranges::fill(ids.span<std::int32_t>(), 77);
  expect_counted({.ids = ids, .owners = deal(128, 1)});
}

TEST_P(PlanContract, BadIdsAndRepeatsHaveNoPosition) {
  for (const std::int64_t top_k : {1, 2, 5, 8, 31, 32, 33, 70}) {
    for (const bool allow_duplicates : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "K " << top_k << " allowed " << allow_duplicates);
      Random random(static_cast<std::uint64_t>(top_k));
      Tensor ids({2000 / top_k, top_k}, Dtype::i32);
      for (auto& id : ids.span<std::int32_t>())
        id = static_cast<std::int32_t>(random.below(46)) - 3;
      expect_counted({.ids = ids,
                      .owners = deal(40, 3),
                      .num_ranks = 3,
                      .allow_duplicates = allow_duplicates,
                      .columns_apart = top_k % 3});
    }
  }
}

TEST_P(PlanContract, TheFirstBadIdIsNamed) {
  Tensor ids = Random(5).expert_ids({.num_tokens = 3000, .top_k = 4, .num_experts = 16});
  const auto all = ids.span<std::int32_t>();
  all[4 * 2999 + 1] = -2;
  all[4 * 1700 + 3] = all[4 * 1700];
  all[4 * 1701 + 0] = 16;
  const Problem problem{.ids = ids, .owners = deal(16, 1)};
  EXPECT_EQ(count(problem).problems, (Words{-1, 1700, 3, all[4 * 1700], 1}));
  all[4 * 1700 + 3] = -1;
  EXPECT_EQ(count(problem).problems, (Words{-1, 1701, 0, 16, 0}));
}

TEST_P(PlanContract, WhatTheRouterMetStays) {
  const Tensor ids = Tensor::from<std::int32_t>({2, 2}, {0, 0, 1, 9});
  const Words met{7, 1, 1, 9, 0};
  EXPECT_EQ(count({.ids = ids, .owners = deal(2, 1), .problems = met}).problems, met);
  const Words non_finite{7, -1, -1, -1, 0};
  EXPECT_EQ(count({.ids = ids, .owners = deal(2, 1), .problems = non_finite}).problems,
            (Words{7, 0, 1, 0, 1}));
}

struct Laid {
  Ints expert_offsets;
  Ints rows_before;
  Ints kept_rows;
  Ints row_offsets;
  Ints group_rows;
  Ints source_offsets;
  Words layout;
};

struct Input {
  Ints counts;  // [ranks, E]
  Ints owners;
  int num_ranks = 1;
  int rank = 0;
  std::int64_t alignment = 1;
  Sizing sizing;

  std::int64_t count(std::int64_t r, std::int64_t e) const {
    return counts[index(r * std::ssize(owners) + e)];
  }
  std::int64_t total(std::int64_t e) const {
    std::int64_t sum = 0;
    for (int r = 0; r < num_ranks; ++r) sum += count(r, e);
    return sum;
  }
  Ints experts_of(int r) const {
    Ints experts;
    for (std::int32_t e = 0; e < std::ssize(owners); ++e) {
      if (owners[index(e)] == r) experts.push_back(e);
    }
    return experts;
  }
  std::int64_t rows_at(const Ints& experts, std::int64_t level) const {
    std::int64_t rows = 0;
    for (const auto e : experts) rows += round_up(std::min(total(e), level), alignment);
    return rows;
  }
};

// Levels one after the other, then a block of the alignment more for the first that are cut.
Words fit(const Input& in, const Ints& experts) {
  const auto capacity = in.sizing.capacity();
  std::int64_t level = 0;
  while (level < capacity && in.rows_at(experts, level + 1) <= capacity) ++level;
  std::int64_t left = capacity - in.rows_at(experts, level);
  Words kept;
  for (const auto e : experts) {
    kept.push_back(std::min(in.total(e), level));
    if (kept.back() == in.total(e) || left < in.alignment) continue;
    kept.back() = std::min(in.total(e), round_up(level, in.alignment) + in.alignment);
    left -= in.alignment;
  }
  return kept;
}

void lay_out_rank_plainly(const Input& in, int r, Laid& laid) {
  const Ints experts = in.experts_of(r);
  std::int64_t needed = 0;
  std::int64_t dropped = 0;
  Words kept;
  for (const auto e : experts) {
    kept.push_back(in.total(e));
    needed += round_up(in.total(e), in.alignment);
    dropped += in.total(e);
  }
  const bool overflows = in.sizing.is_bounded() && needed > in.sizing.capacity();
  const auto capacity = in.sizing.is_bounded() ? in.sizing.capacity() : needed;
  if (overflows && in.sizing.overflow() == Overflow::drop) kept = fit(in, experts);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto e = index(experts[i]);
    const auto rows = std::min(kept[i], capacity - end);
    laid.expert_offsets[e] = static_cast<std::int32_t>(end);
    laid.kept_rows[e] = static_cast<std::int32_t>(rows);
    if (r == in.rank) laid.row_offsets.push_back(static_cast<std::int32_t>(end));
    if (r == in.rank) laid.group_rows.push_back(static_cast<std::int32_t>(rows));
    end = std::min(end + round_up(rows, in.alignment), capacity);
    dropped -= rows;
  }
  if (r == in.rank) laid.row_offsets.push_back(static_cast<std::int32_t>(end));
  if (overflows) laid.layout[index(kOverflowWord)] = 1;
  laid.layout[index(used_rows_word(in.num_ranks, r))] = end;
  laid.layout[index(needed_rows_word(in.num_ranks, r))] = needed;
  laid.layout[index(dropped_word(in.num_ranks, r))] = dropped;
}

Laid lay_out_plainly(const Input& in) {
  Laid laid{.expert_offsets = Ints(in.owners.size()),
            .rows_before = Ints(in.owners.size()),
            .kept_rows = Ints(in.owners.size()),
            .source_offsets = {0},
            .layout = Words(index(layout_words(in.num_ranks)))};
  for (int r = 0; r < in.num_ranks; ++r) lay_out_rank_plainly(in, r, laid);
  for (std::size_t e = 0; e < in.owners.size(); ++e) {
    const auto at = static_cast<std::int64_t>(e);
    for (int r = 0; r < in.rank; ++r) {
      laid.rows_before[e] += static_cast<std::int32_t>(in.count(r, at));
    }
    laid.rows_before[e] = std::min(laid.rows_before[e], laid.kept_rows[e]);
    laid.source_offsets.push_back(laid.source_offsets.back() +
                                  static_cast<std::int32_t>(in.count(in.rank, at)));
  }
  return laid;
}

class LayOutContract : public PlanContract {
 protected:
  Laid lay_out(const Input& in, const TensorView* step = nullptr,
               const Words& met = {kNoProblems.begin(), kNoProblems.end()}) const {
    const auto num_experts = std::ssize(in.owners);
    Ints by_rank;
    Ints offsets{0};
    for (int r = 0; r < in.num_ranks; ++r) {
      for (const auto e : in.experts_of(r)) by_rank.push_back(e);
      offsets.push_back(static_cast<std::int32_t>(by_rank.size()));
    }
    const auto num_local = std::ssize(in.experts_of(in.rank));
    const Tensor counts = put(Tensor::from<std::int32_t>({in.num_ranks, num_experts}, in.counts));
    const Tensor owners = put_all(in.owners);
    const Tensor experts_by_rank = put_all(by_rank);
    const Tensor rank_offsets = put_all(offsets);
    const Tensor problems = put_all(met);
    Tensor expert_offsets = poisoned(num_experts, Dtype::i32);
    Tensor rows_before = poisoned(num_experts, Dtype::i32);
    Tensor kept_rows = poisoned(num_experts, Dtype::i32);
    Tensor row_offsets = poisoned(num_local + 1, Dtype::i32);
    Tensor group_rows = poisoned(num_local, Dtype::i32);
    Tensor source_offsets = poisoned(num_experts + 1, Dtype::i32);
    Tensor layout = poisoned(layout_words(in.num_ranks), Dtype::i64);
    LayOut args{.counts = counts,
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
    if (step != nullptr) args.problems = problems;
    if (step != nullptr) args.step = *step;
    device.backend().lay_out(args);
    return {values<std::int32_t>(get(expert_offsets)), values<std::int32_t>(get(rows_before)),
            values<std::int32_t>(get(kept_rows)),      values<std::int32_t>(get(row_offsets)),
            values<std::int32_t>(get(group_rows)),     values<std::int32_t>(get(source_offsets)),
            values<std::int64_t>(get(layout))};
  }

  void expect_laid_out(const Input& in) const {
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
  }

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
SWITCHYARD_ON_DEVICES(LayOutContract);

TEST_P(LayOutContract, GroupsLieOneBehindTheOther) {
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

TEST_P(LayOutContract, RowsThatDoNotFitAreCut) {
  for (const int num_experts : {1, 5, 64, 1100}) {
    for (const int num_ranks : {1, 4}) {
      for (const std::int64_t alignment : {1, 8}) {
        Input in{random_counts(num_ranks, num_experts),
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

TEST_P(LayOutContract, RowsBeyondThirtyTwoBitsAreSaidAndHaveNoRoom) {
  const Input in{{1500000000, 600000000, 5}, deal(3, 1), 1, 0, 1 << 30, Sizing::exact()};
  const Laid laid = lay_out(in);
  EXPECT_EQ(laid.layout[index(needed_rows_word(1, 0))], 4LL << 30);
  for (const auto offset : laid.row_offsets) EXPECT_GE(offset, 0);
  for (const auto rows : laid.group_rows) EXPECT_GE(rows, 0);
}

TEST_P(LayOutContract, AStepKeepsTheMostRowsAndTheFirstProblem) {
  Tensor step = put(Tensor::zeros({kStepWords}, Dtype::i64));
  const TensorView view = step.view();
  const auto add = [&](Ints counts, const Words& met) {
    const Input in{std::move(counts), deal(2, 1), 1, 0, 4, Sizing::bounded(8)};
    lay_out(in, &view, met);
    return values<std::int64_t>(get(step));
  };
  const Words none{kNoProblems.begin(), kNoProblems.end()};
  EXPECT_EQ(add({1, 5}, none), (Words{12, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(add({1, 1}, {3, -1, -1, -1, 0}), (Words{12, 1, 3, -1, -1, -1, 0}));
  EXPECT_EQ(add({9, 9}, {-1, 2, 1, 0, 1}), (Words{24, 1, 3, -1, -1, -1, 0}));
}

// One rank of several, whose counts are made up but for its own.
TEST_P(LayOutContract, SlotsAndSourcesFollowTheLayout) {
  for (const bool bounded : {false, true}) {
    constexpr int kExperts = 48;
    constexpr int kRanks = 3;
    constexpr std::int64_t kTopK = 5;
    Tensor ids = Random(9).expert_ids(
        {.num_tokens = 1500, .top_k = kTopK, .num_experts = kExperts, .skew = 0.4, .none = 0.1});
    ids.span<std::int32_t>()[11] = kExperts;
    const Ints owners = deal(kExperts, kRanks);
    const Counted counted = count({.ids = ids, .owners = owners, .num_ranks = kRanks});
    Input in{random_counts(kRanks, kExperts), owners, kRanks, 1, 8, Sizing::exact()};
    std::ranges::copy(counted.counts, in.counts.begin() + kExperts);
    if (bounded) in.sizing = Sizing::bounded(1600, Overflow::drop);
    const Laid laid = lay_out(in);

    const Tensor device_ids = put(ids);
    const Tensor device_owners = put_all(owners);
    const Tensor expert_offsets = put_all(laid.expert_offsets);
    const Tensor rows_before = put_all(laid.rows_before);
    const Tensor kept_rows = put_all(laid.kept_rows);
    const Tensor source_offsets = put_all(laid.source_offsets);
    Tensor slots = put_all(counted.positions);
    Tensor targets = poisoned(1500 * kTopK, Dtype::i32);
    Tensor sources = poisoned(1500 * kTopK, Dtype::i32);
    device.backend().assign_slots({.expert_ids = device_ids,
                                   .owners = device_owners,
                                   .expert_offsets = expert_offsets,
                                   .rows_before = rows_before,
                                   .kept_rows = kept_rows,
                                   .source_offsets = source_offsets,
                                   .slots = slots,
                                   .target_ranks = targets,
                                   .sources = sources});
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
    EXPECT_TRUE(values<std::int32_t>(get(slots)) == expected_slots);
    EXPECT_TRUE(values<std::int32_t>(get(targets)) == expected_targets);
    Ints used = values<std::int32_t>(get(sources));
    used.resize(expected_sources.size());
    EXPECT_TRUE(used == expected_sources);
    EXPECT_EQ(bounded,
              std::ranges::count(expected_slots, -1) > std::ranges::count(expected_targets, -1));
  }
}

}  // namespace
}  // namespace switchyard
