// SPDX-License-Identifier: Apache-2.0
// The whole plan of a rank that is alone on every device, against plain loops. GPUs make small
// plans in one kernel and larger ones step by step, so the sizes lie on both sides of that limit.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "support/device/device_tables.h"
#include "support/device/plain_layout.h"
#include "support/random.h"
#include "support/wide_ids.h"

namespace switchyard::plan_alone_contract_test {
namespace {

using testing::count_plainly;
using testing::Counted;
using testing::deal;
using testing::index;
using testing::Ints;
using testing::Laid;
using testing::lay_out_plainly;
using testing::no_problems;
using testing::Random;
using testing::values;
using testing::wide_ids;
using testing::Words;

struct Problem {
  const Tensor& ids;  // [T, K] i32, on the host
  int num_experts = 1;
  std::int64_t alignment = 1;
  Sizing sizing = Sizing::bounded(100000);
  bool allow_duplicates = false;
  bool are_ids_wide = false;        // i64, with the id E for none
  std::int64_t columns_apart = 0;   // extra columns after every row of the ids
  std::optional<Words> words = {};  // of the router
  std::int64_t first_non_finite_token = -1;
  Words step = Words(index(kStepWords));
};

struct Made {
  Ints counts, distinct_tokens, expert_offsets, rows_before, kept_rows, row_offsets, group_rows,
      source_offsets, slots, target_ranks, sources, row_sources;
  Words problems, layout;
  Words step = {};

  friend bool operator==(const Made&, const Made&) = default;
};

Ints poison_words(std::int64_t count) {
  return values<std::int32_t>(testing::poisoned({count}, Dtype::i32));
}

std::int64_t num_slots(const Problem& p, std::int64_t used_rows) {
  return p.sizing.is_bounded() ? p.sizing.capacity() : used_rows;
}

Words expected_step(const Problem& p, const Made& made) {
  Words step = p.step;
  step[kStepMostNeeded] = std::max(step[kStepMostNeeded], made.layout[needed_rows_word(1, 0)]);
  const bool has_problem = made.problems[kNonFiniteToken] >= 0 || made.problems[kBadToken] >= 0;
  if (step[kStepHasProblem] != 0 || !has_problem) return step;
  step[kStepHasProblem] = 1;
  std::ranges::copy(made.problems, step.begin() + kStepProblem);
  return step;
}

Made plan_plainly(const Problem& p) {
  const Ints owners = deal(p.num_experts, 1);
  const Words before = p.words.value_or(Words{p.first_non_finite_token, -1, 0, 0, 0});
  const Counted counted = count_plainly(p.ids, owners, 1, p.allow_duplicates, before);
  const Laid laid = lay_out_plainly({counted.counts, owners, 1, 0, p.alignment, p.sizing});
  const auto picks = std::ssize(counted.positions);
  Made made{.counts = counted.counts,
            .distinct_tokens = counted.distinct_tokens,
            .expert_offsets = laid.expert_offsets,
            .rows_before = laid.rows_before,
            .kept_rows = laid.kept_rows,
            .row_offsets = laid.row_offsets,
            .group_rows = laid.group_rows,
            .source_offsets = laid.source_offsets,
            .slots = Ints(index(picks), -1),
            .target_ranks = Ints(index(picks), -1),
            .sources = poison_words(picks),
            .row_sources = poison_words(num_slots(p, laid.row_offsets.back())),
            .problems = counted.problems,
            .layout = laid.layout};
  made.step = expected_step(p, made);
  for (std::int64_t i = 0; i < picks; ++i) {
    const auto position = counted.positions[index(i)];
    if (position < 0) continue;
    const auto e = index(p.ids.span<std::int32_t>()[index(i)]);
    made.target_ranks[index(i)] = 0;
    made.sources[index(laid.source_offsets[e] + position)] = static_cast<std::int32_t>(i);
    if (position >= laid.kept_rows[e]) continue;
    made.slots[index(i)] = laid.expert_offsets[e] + position;
    made.row_sources[index(made.slots[index(i)])] = static_cast<std::int32_t>(i);
  }
  return made;
}

TensorView one_row(Tensor& table) {
  const TensorView view = table.view();
  return {view.data(), view.dtype(), {1, view.rows()}, view.rows(), view.owner(), view.memory()};
}

class PlanAloneContract : public testing::DeviceTables {
 protected:
  // The plan's input and tables on the device.
  struct Tables {
    Tensor ids, owners, by_rank, rank_offsets, words;
    Tensor counts, distinct_tokens, problems;
    Tensor expert_offsets, rows_before, kept_rows, row_offsets, group_rows, source_offsets, layout;
    Tensor step;
    Tensor slots, target_ranks, sources, row_sources;
  };
  Tables take(const Problem& p) const;
  static PlanAlone args_of(const Problem& p, Tables& t);
  Made fetch(const Tables& t) const;
  Made plan(const Problem& p) const {
    Tables tables = take(p);
    backend_of(device).plan_alone(args_of(p, tables));
    return fetch(tables);
  }
  void expect_planned(const Problem& p) const {
    SCOPED_TRACE(::testing::Message()
                 << "T " << p.ids.rows() << " K " << p.ids.shape()[1] << " E " << p.num_experts
                 << " alignment " << p.alignment << " bounded " << p.sizing.is_bounded()
                 << " capacity " << p.sizing.capacity());
    const Made actual = plan(p);
    const Made expected = plan_plainly(p);
    EXPECT_EQ(actual.counts, expected.counts);
    EXPECT_EQ(actual.problems, expected.problems);
    EXPECT_EQ(actual.layout, expected.layout);
    EXPECT_EQ(actual.step, expected.step);
    EXPECT_EQ(actual.group_rows, expected.group_rows);
    EXPECT_TRUE(actual.slots == expected.slots);
    EXPECT_TRUE(actual.row_sources == expected.row_sources);
    EXPECT_TRUE(actual == expected);
  }
};
SWITCHYARD_ON_DEVICES(PlanAloneContract);

PlanAloneContract::Tables PlanAloneContract::take(const Problem& p) const {
  const std::int64_t experts = p.num_experts;
  const std::int64_t picks = p.ids.shape().num_elements();
  Ints all_experts(index(experts));
  std::iota(all_experts.begin(), all_experts.end(), 0);
  const auto rows = std::ssize(plan_plainly(p).row_sources);
  return {.ids = p.are_ids_wide ? put_apart(wide_ids(p.ids, experts), p.columns_apart)
                                : put_apart(p.ids, p.columns_apart),
          .owners = put_all(deal(p.num_experts, 1)),
          .by_rank = put_all(all_experts),
          .rank_offsets = put_all(Ints{0, p.num_experts}),
          .words = put_all(p.words.value_or(Words{})),
          .counts = poisoned(experts, Dtype::i32),
          .distinct_tokens = poisoned(1, Dtype::i32),
          .problems = poisoned(kProblemWords, Dtype::i64),
          .expert_offsets = poisoned(experts, Dtype::i32),
          .rows_before = poisoned(experts, Dtype::i32),
          .kept_rows = poisoned(experts, Dtype::i32),
          .row_offsets = poisoned(experts + 1, Dtype::i32),
          .group_rows = poisoned(experts, Dtype::i32),
          .source_offsets = poisoned(experts + 1, Dtype::i32),
          .layout = poisoned(layout_words(1), Dtype::i64),
          .step = put_all(p.step),
          .slots = poisoned(picks, Dtype::i32),
          .target_ranks = poisoned(picks, Dtype::i32),
          .sources = poisoned(picks, Dtype::i32),
          .row_sources = poisoned(rows, Dtype::i32)};
}

PlanAlone PlanAloneContract::args_of(const Problem& p, Tables& t) {
  PlanAlone args{.expert_ids = narrow(t.ids, p.ids.shape()),
                 .problems = {.first_non_finite_token = p.first_non_finite_token},
                 .count = {.owners = t.owners,
                           .allow_duplicates = p.allow_duplicates,
                           .counts = t.counts,
                           .distinct_tokens = t.distinct_tokens,
                           .positions = t.slots,
                           .problems = t.problems},
                 .layout = {.counts = one_row(t.counts),
                            .owners = t.owners,
                            .experts_by_rank = t.by_rank,
                            .rank_offsets = t.rank_offsets,
                            .alignment = p.alignment,
                            .sizing = p.sizing,
                            .expert_offsets = t.expert_offsets,
                            .rows_before = t.rows_before,
                            .kept_rows = t.kept_rows,
                            .row_offsets = t.row_offsets,
                            .group_rows = t.group_rows,
                            .source_offsets = t.source_offsets,
                            .layout = t.layout,
                            .problems = one_row(t.problems),
                            .step = t.step.view()},
                 .slots = {.owners = t.owners,
                           .expert_offsets = t.expert_offsets,
                           .rows_before = t.rows_before,
                           .kept_rows = t.kept_rows,
                           .source_offsets = t.source_offsets,
                           .positions = t.slots,
                           .slots = t.slots,
                           .target_ranks = t.target_ranks,
                           .sources = t.sources,
                           .row_sources = t.row_sources.view()}};
  if (p.are_ids_wide) args.first_sentinel = p.num_experts;
  if (p.words) args.problems.words = t.words.view();
  return args;
}

Made PlanAloneContract::fetch(const Tables& t) const {
  const auto ints = [&](const Tensor& table) { return values<std::int32_t>(get(table)); };
  const auto words = [&](const Tensor& table) { return values<std::int64_t>(get(table)); };
  return {.counts = ints(t.counts),
          .distinct_tokens = ints(t.distinct_tokens),
          .expert_offsets = ints(t.expert_offsets),
          .rows_before = ints(t.rows_before),
          .kept_rows = ints(t.kept_rows),
          .row_offsets = ints(t.row_offsets),
          .group_rows = ints(t.group_rows),
          .source_offsets = ints(t.source_offsets),
          .slots = ints(t.slots),
          .target_ranks = ints(t.target_ranks),
          .sources = ints(t.sources),
          .row_sources = ints(t.row_sources),
          .problems = words(t.problems),
          .layout = words(t.layout),
          .step = words(t.step)};
}

// A GPU's one kernel plans up to 2048 picks, and with few of them about 1880 experts.
const std::vector<Random::Picks> kSizes{
    {0, 2, 4},      {1, 1, 1},           {1, 8, 128},        {2, 4, 32},
    {5, 3, 7, 0.5}, {64, 8, 128, 0.3},   {100, 17, 40, 0.5}, {40, 33, 50, 0.5, 0.1},
    {256, 8, 128},  {257, 8, 128},       {2048, 1, 3, 0.9},  {2049, 1, 3, 0.9},
    {32, 64, 200},  {33, 64, 200},       {511, 4, 128, 0.7}, {512, 4, 128, 0.7},
    {513, 4, 128},  {4, 4, 1850},        {4, 4, 1950},       {200, 8, 1024, 0.0, 0.1},
    {250, 8, 1024}, {20, 1, 1, 0.0, 1.0}};

TEST_P(PlanAloneContract, EqualsThePlainPlanAtEverySize) {
  for (const auto& size : kSizes) {
    const Tensor ids = Random(3).expert_ids(size);
    for (const std::int64_t alignment : {1, 16, 128}) {
      expect_planned(
          {.ids = ids,
           .num_experts = size.num_experts,
           .alignment = alignment,
           .sizing = Sizing::bounded(size.num_tokens * size.top_k + 128L * size.num_experts)});
    }
    expect_planned({.ids = ids, .num_experts = size.num_experts, .sizing = Sizing::exact()});
  }
}

TEST_P(PlanAloneContract, RowsThatDoNotFitHaveNoSlot) {
  for (const auto& size : {Random::Picks{1, 8, 128}, Random::Picks{300, 4, 24, 0.5, 0.1},
                           Random::Picks{256, 8, 64, 0.3}, Random::Picks{257, 8, 64, 0.3}}) {
    const Tensor ids = Random(4).expert_ids(size);
    for (const std::int64_t alignment : {1, 16, 128}) {
      for (const std::int64_t share : {0, 3, 9}) {
        for (const Overflow overflow : {Overflow::fail, Overflow::drop}) {
          const auto capacity =
              testing::round_up(size.num_tokens * size.top_k * share / 10, alignment);
          expect_planned({.ids = ids,
                          .num_experts = size.num_experts,
                          .alignment = alignment,
                          .sizing = Sizing::bounded(capacity, overflow)});
        }
      }
    }
  }
}

TEST_P(PlanAloneContract, AllTokensPickOneExpert) {
  for (const std::int64_t num_tokens : {1, 31, 500, 2048, 2049}) {
    Tensor ids({num_tokens, 1}, Dtype::i32);
    std::ranges::fill(ids.span<std::int32_t>(), 77);
    expect_planned({.ids = ids, .num_experts = 128, .alignment = 16});
  }
}

TEST_P(PlanAloneContract, BadIdsAndRepeatsHaveNoSlotAndTheFirstIsNamed) {
  for (const std::int64_t top_k : {1, 2, 8, 31, 33, 64}) {
    for (const std::int64_t picks : {top_k, std::int64_t{2000}, std::int64_t{9000}}) {
      for (const bool allow_duplicates : {false, true}) {
        Random random(static_cast<std::uint64_t>(top_k));
        Tensor ids({picks / top_k, top_k}, Dtype::i32);
        for (auto& id : ids.span<std::int32_t>())
          id = static_cast<std::int32_t>(random.below(46)) - 3;
        expect_planned({.ids = ids,
                        .num_experts = 40,
                        .alignment = 8,
                        .allow_duplicates = allow_duplicates,
                        .columns_apart = top_k % 3});
      }
    }
  }
}

TEST_P(PlanAloneContract, IdsMayBeWideAndHaveSentinels) {
  for (const std::int64_t num_tokens : {0, 1, 60, 4096, 4097}) {
    const Tensor ids =
        Random(5).expert_ids({.num_tokens = num_tokens, .top_k = 2, .num_experts = 8, .none = 0.3});
    for (const std::int64_t columns_apart : {0, 3}) {
      expect_planned(
          {.ids = ids, .num_experts = 8, .are_ids_wide = true, .columns_apart = columns_apart});
    }
  }
}

TEST_P(PlanAloneContract, WhatTheRouterFoundStays) {
  for (const std::int64_t num_tokens : {3, 8193}) {
    Tensor ids = Random(6).expert_ids({.num_tokens = num_tokens, .top_k = 1, .num_experts = 8});
    ids.span<std::int32_t>()[2] = 9;
    Words step_with_problem(index(kStepWords), 5);
    step_with_problem[kStepHasProblem] = 1;
    for (const Words& step : {Words(index(kStepWords)), step_with_problem}) {
      expect_planned({.ids = ids, .num_experts = 8, .first_non_finite_token = 1, .step = step});
      expect_planned({.ids = ids, .num_experts = 8, .words = Words{7, 1, 1, 9, 0}, .step = step});
      expect_planned(
          {.ids = ids, .num_experts = 8, .words = Words{7, -1, -1, -1, 0}, .step = step});
      expect_planned({.ids = ids, .num_experts = 8, .words = no_problems(), .step = step});
    }
  }
}

// One more token, which picks nothing, makes the plan too large for a single kernel.
TEST_P(PlanAloneContract, ATokenWithoutPicksChangesNothing) {
  const Tensor ids = Random(7).expert_ids({.num_tokens = 256, .top_k = 8, .num_experts = 64});
  Tensor more({257, 8}, Dtype::i32);
  std::ranges::fill(more.span<std::int32_t>(), -1);
  std::ranges::copy(ids.span<std::int32_t>(), more.span<std::int32_t>().begin());
  const Made smaller = plan({.ids = ids, .num_experts = 64, .alignment = 16});
  Made larger = plan({.ids = more, .num_experts = 64, .alignment = 16});
  EXPECT_TRUE(std::ranges::all_of(larger.slots.end() - 8, larger.slots.end(),
                                  [](const auto slot) { return slot == -1; }));
  for (Ints* table : {&larger.slots, &larger.target_ranks, &larger.sources}) table->resize(2048);
  EXPECT_TRUE(larger == smaller);
}

}  // namespace
}  // namespace switchyard::plan_alone_contract_test
