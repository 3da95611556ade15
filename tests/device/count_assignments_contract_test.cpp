// SPDX-License-Identifier: Apache-2.0
// Counting assignments on every device, against a plain loop over one after the other.
#include <gtest/gtest.h>

#include "support/device/device_tables.h"
#include "support/device/plain_layout.h"
#include "support/random.h"

namespace switchyard::count_assignments_contract_test {
namespace {

using testing::count_plainly;
using testing::Counted;
using testing::CountProblem;
using testing::deal;
using testing::index;
using testing::Ints;
using testing::Random;
using testing::Words;

class CountAssignmentsContract : public testing::DeviceTables {
 protected:
  void expect_counted(const CountProblem& p) const {
    const Counted actual = count(p);
    const Counted expected =
        count_plainly(p.ids, p.owners, p.num_ranks, p.allow_duplicates, p.problems);
    EXPECT_EQ(actual.counts, expected.counts);
    EXPECT_EQ(actual.distinct_tokens, expected.distinct_tokens);
    EXPECT_TRUE(actual.positions == expected.positions);
    EXPECT_TRUE(actual.token_positions == expected.token_positions);
    EXPECT_EQ(actual.problems, expected.problems);
  }
};
SWITCHYARD_ON_DEVICES(CountAssignmentsContract);

TEST_P(CountAssignmentsContract, CountsInOrderAtEverySize) {
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
                                {{64, 4, 30000}, 2},      {{20, 1, 1, 0.0, 1.0}, 1},
                                {{64, 2, 752}, 16}};  // 48 KB of counters to the byte
  for (const auto& [picks, num_ranks] : sizes) {
    SCOPED_TRACE(::testing::Message() << "T " << picks.num_tokens << " K " << picks.top_k << " E "
                                      << picks.num_experts << " ranks " << num_ranks);
    const Tensor ids = Random(3).expert_ids(picks);
    expect_counted(
        {.ids = ids, .owners = deal(picks.num_experts, num_ranks), .num_ranks = num_ranks});
  }
}

TEST_P(CountAssignmentsContract, EveryTokenPicksOneExpert) {
  Tensor ids({5000, 1}, Dtype::i32);
  std::ranges::fill(ids.span<std::int32_t>(), 77);
  expect_counted({.ids = ids, .owners = deal(128, 1)});
}

TEST_P(CountAssignmentsContract, BadIdsAndRepeatsHaveNoPosition) {
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

// With ids that are bad, none or picked already.
TEST_P(CountAssignmentsContract, TokensAreCountedOnceAtEveryRank) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    for (const std::int64_t top_k : {1, 2, 8, 40}) {
      for (const std::int64_t num_tokens : {1, 70, 5000}) {
        for (const bool allow_duplicates : {false, true}) {
          SCOPED_TRACE(::testing::Message() << "T " << num_tokens << " K " << top_k << " ranks "
                                            << num_ranks << " allowed " << allow_duplicates);
          Random random(static_cast<std::uint64_t>(num_tokens + top_k));
          Tensor ids({num_tokens, top_k}, Dtype::i32);
          for (auto& id : ids.span<std::int32_t>())
            id = static_cast<std::int32_t>(random.below(30)) - 4;
          expect_counted({.ids = ids,
                          .owners = deal(24, num_ranks),
                          .num_ranks = num_ranks,
                          .allow_duplicates = allow_duplicates});
        }
      }
    }
  }
}

TEST_P(CountAssignmentsContract, PositionsOfTokensThatAreNotAskedForAreNotWritten) {
  const Tensor ids = Random(4).expert_ids({.num_tokens = 900, .top_k = 2, .num_experts = 8});
  const CountProblem problem{.ids = ids, .owners = deal(8, 2), .num_ranks = 2};
  CountProblem without = problem;
  without.counts_tokens = false;
  const Counted counted = count(without);
  EXPECT_EQ(counted.distinct_tokens, count(problem).distinct_tokens);
  EXPECT_EQ(counted.token_positions,
            testing::values<std::int32_t>(testing::poisoned({1800}, Dtype::i32)));
}

TEST_P(CountAssignmentsContract, TheFirstBadIdIsNamed) {
  Tensor ids = Random(5).expert_ids({.num_tokens = 3000, .top_k = 4, .num_experts = 16});
  const auto all = ids.span<std::int32_t>();
  all[4 * 2999 + 1] = -2;
  all[4 * 1700 + 3] = all[4 * 1700];
  all[4 * 1701 + 0] = 16;
  const CountProblem problem{.ids = ids, .owners = deal(16, 1)};
  EXPECT_EQ(count(problem).problems, (Words{-1, 1700, 3, all[4 * 1700], 1}));
  all[4 * 1700 + 3] = -1;
  EXPECT_EQ(count(problem).problems, (Words{-1, 1701, 0, 16, 0}));
}

TEST_P(CountAssignmentsContract, ProblemsOfTheRouterAreKept) {
  const Tensor ids = Tensor::from<std::int32_t>({2, 2}, {0, 0, 1, 9});
  const Words met{7, 1, 1, 9, 0};
  EXPECT_EQ(count({.ids = ids, .owners = deal(2, 1), .problems = met}).problems, met);
  const Words non_finite{7, -1, -1, -1, 0};
  EXPECT_EQ(count({.ids = ids, .owners = deal(2, 1), .problems = non_finite}).problems,
            (Words{7, 0, 1, 0, 1}));
}

}  // namespace
}  // namespace switchyard::count_assignments_contract_test
