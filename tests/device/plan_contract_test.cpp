// SPDX-License-Identifier: Apache-2.0
// Laying out on every device, against plain loops over one expert after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "support/device/device_layout.h"

namespace switchyard::plan_contract_test {
namespace {

using testing::deal;
using testing::index;
using testing::Ints;
using testing::Laid;
using testing::lay_out_plainly;
using testing::LayoutInput;
using testing::no_problems;
using testing::random_counts;
using testing::round_up;
using testing::values;
using testing::Words;

class PlanContract : public testing::DeviceLayout {
 protected:
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
};
SWITCHYARD_ON_DEVICES(PlanContract);

TEST_P(PlanContract, GroupsAreConsecutive) {
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

}  // namespace
}  // namespace switchyard::plan_contract_test
