// Where the CPU lays out the groups of experts, and what it says of them.
#include <gtest/gtest.h>

#include <limits>

#include "device/cpu/kernels.h"
#include "support/compare.h"

namespace switchyard::cpu::layout_test {
namespace {

using testing::poison;
using testing::same_bits;
using Words = std::vector<std::int64_t>;

Tensor ints(std::initializer_list<std::int32_t> values) {
  return Tensor::from<std::int32_t>({static_cast<std::int64_t>(values.size())}, values);
}

// Experts 0 and 2 on rank 0, expert 1 on rank 1.
struct TwoRanks {
  explicit TwoRanks(std::initializer_list<std::int32_t> counts_of_ranks)
      : counts(Tensor::from<std::int32_t>({2, 3}, counts_of_ranks)) {
    for (Tensor* table : {&expert_offsets, &rows_before, &kept_rows, &row_offsets, &group_rows,
                          &source_offsets, &layout}) {
      poison(*table);
    }
  }

  LayOut args(int rank) {
    return {.counts = counts,
            .owners = owners,
            .experts_by_rank = experts_by_rank,
            .rank_offsets = rank_offsets,
            .rank = rank,
            .expert_offsets = expert_offsets,
            .rows_before = rows_before,
            .kept_rows = kept_rows,
            .row_offsets = row_offsets.view().slice(0, rank == 0 ? 3 : 2),
            .group_rows = group_rows.view().slice(0, rank == 0 ? 2 : 1),
            .source_offsets = source_offsets,
            .layout = layout};
  }
  Words words() const {
    const auto all = layout.span<std::int64_t>();
    return {all.begin(), all.end()};
  }

  Tensor counts;
  Tensor owners = ints({0, 1, 0});
  Tensor experts_by_rank = ints({0, 2, 1});
  Tensor rank_offsets = ints({0, 2, 3});
  Tensor expert_offsets = Tensor({3}, Dtype::i32);
  Tensor rows_before = Tensor({3}, Dtype::i32);
  Tensor kept_rows = Tensor({3}, Dtype::i32);
  Tensor row_offsets = Tensor({3}, Dtype::i32);
  Tensor group_rows = Tensor({2}, Dtype::i32);
  Tensor source_offsets = Tensor({4}, Dtype::i32);
  Tensor layout = Tensor({layout_words(2)}, Dtype::i64);
};

TEST(LayOut, GroupsFollowEachOtherAtTheirOwners) {
  TwoRanks ranks({3, 4, 1, 2, 0, 5});
  LayOut args = ranks.args(1);
  args.alignment = 4;
  lay_out(args);
  EXPECT_TRUE(same_bits(ranks.expert_offsets, ints({0, 0, 8})));
  EXPECT_TRUE(same_bits(ranks.kept_rows, ints({5, 4, 6})));
  EXPECT_TRUE(same_bits(ranks.rows_before, ints({3, 4, 1})));
  EXPECT_TRUE(same_bits(ranks.source_offsets, ints({0, 2, 2, 7})));
  EXPECT_TRUE(same_bits(args.row_offsets, ints({0, 4})));
  EXPECT_TRUE(same_bits(args.group_rows, ints({4})));
  EXPECT_EQ(ranks.words(), (Words{0, 16, 4, 16, 4, 0, 0}));

  args = ranks.args(0);
  args.alignment = 4;
  lay_out(args);
  EXPECT_TRUE(same_bits(ranks.rows_before, ints({0, 0, 0})));
  EXPECT_TRUE(same_bits(ranks.source_offsets, ints({0, 3, 7, 8})));
  EXPECT_TRUE(same_bits(args.row_offsets, ints({0, 8, 16})));
  EXPECT_TRUE(same_bits(args.group_rows, ints({5, 6})));
}

TEST(LayOut, WhatDoesNotFitIsSaid) {
  TwoRanks ranks({3, 4, 1, 2, 0, 5});
  LayOut args = ranks.args(0);
  args.sizing = Sizing::bounded(8);
  lay_out(args);  // the first of the rank's groups, and what the second still has room for
  EXPECT_TRUE(same_bits(ranks.kept_rows, ints({5, 4, 3})));
  EXPECT_EQ(ranks.words(), (Words{1, 8, 4, 11, 4, 3, 0}));
  args.sizing = Sizing::bounded(8, Overflow::drop);
  lay_out(args);  // both at one level
  EXPECT_TRUE(same_bits(ranks.kept_rows, ints({4, 4, 4})));
  EXPECT_TRUE(same_bits(args.row_offsets, ints({0, 4, 8})));
  EXPECT_EQ(ranks.words(), (Words{1, 8, 4, 11, 4, 3, 0}));
  args = ranks.args(1);  // rank 0 sends 3 rows to expert 0, of which 1 is kept
  args.sizing = Sizing::bounded(2, Overflow::drop);
  lay_out(args);
  EXPECT_TRUE(same_bits(ranks.rows_before, ints({1, 2, 1})));
}

TEST(LayOut, MoreRowsThan32BitsNameAreCountedAndClamped) {
  constexpr auto kMost = std::numeric_limits<std::int32_t>::max();
  TwoRanks ranks({kMost, kMost, 2, kMost, 1, 3});
  LayOut args = ranks.args(1);
  lay_out(args);
  const std::int64_t expert_0 = std::int64_t{2} * kMost;
  const std::int64_t expert_1 = std::int64_t{kMost} + 1;
  EXPECT_EQ(ranks.words(), (Words{0, expert_0 + 5, expert_1, expert_0 + 5, expert_1, 0, 0}));
  EXPECT_TRUE(same_bits(ranks.expert_offsets, ints({0, 0, kMost})));
  EXPECT_TRUE(same_bits(ranks.kept_rows, ints({kMost, kMost, 5})));
  EXPECT_TRUE(same_bits(args.row_offsets, ints({0, kMost})));
}

TEST(LayOut, AStepHearsTheMostRowsAndTheFirstProblem) {
  const auto step_after = [](Tensor& step, std::int32_t rows, const Words& met) {
    TwoRanks ranks({rows, 0, 0, 0, 0, 0});
    const Tensor problems =
        Tensor::from<std::int64_t>({kProblemWords}, std::span<const std::int64_t>(met));
    LayOut args = ranks.args(0);
    args.problems = problems;
    args.step = step;
    lay_out(args);
    const auto words = step.span<std::int64_t>();
    return Words(words.begin(), words.end());
  };
  Tensor step = Tensor::zeros({kStepWords}, Dtype::i64);
  EXPECT_EQ(step_after(step, 5, {-1, -1, 0, 0, 0}), (Words{5, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(step_after(step, 3, {-1, 7, 1, 99, 0}), (Words{5, 1, -1, 7, 1, 99, 0}));
  EXPECT_EQ(step_after(step, 6, {4, -1, 0, 0, 0}), (Words{6, 1, -1, 7, 1, 99, 0}));
}

}  // namespace
}  // namespace switchyard::cpu::layout_test
