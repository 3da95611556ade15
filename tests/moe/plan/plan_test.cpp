// SPDX-License-Identifier: Apache-2.0
#include "switchyard/plan.h"

#include <gtest/gtest.h>

#include "device/plan_words.h"
#include "moe/plan/plan_maker.h"
#include "moe/plan/plans.h"
#include "support/compare.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/random.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/router.h"
#include "switchyard/run_ranks.h"

namespace switchyard::plan_test {
namespace {

using testing::error_of;
using testing::ids_of;
using testing::on_ranks;
using testing::options_with;
using testing::RankCase;
using testing::same_bits;

Tensor words_of(std::initializer_list<std::int64_t> words) {
  return Tensor::from<std::int64_t>({static_cast<std::int64_t>(words.size())}, words);
}

// Counts given rank by rank: rank 0 sends 2 and 3 tokens to experts 0 and 1, rank 1 sends 1 and 4.
TEST(Plan, KnownPermutation) {
  run_ranks(2, [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::from_owners({0, 0}, 2), options_with());
    const Plan plan = planner.plan(comm.rank() == 0 ? ids_of({5, 1}, {0, 0, 1, 1, 1})
                                                    : ids_of({5, 1}, {0, 1, 1, 1, 1}));
    const Tensor expected =
        comm.rank() == 0 ? ids_of({5, 1}, {0, 1, 3, 4, 5}) : ids_of({5, 1}, {2, 6, 7, 8, 9});
    EXPECT_TRUE(same_bits(plan.slots(), expected));
    EXPECT_EQ(plan.num_rows(), comm.rank() == 0 ? 10 : 0);
  });
}

TEST(Plan, SourcesInvertTheSlots) {
  const auto world = connect();
  Planner planner(*world, ExpertPlacement::contiguous(3, 1), options_with());
  const Plan plan = planner.plan(ids_of({3, 2}, {2, 0, -1, 2, 0, 1}));
  EXPECT_TRUE(same_bits(plan.sources(), ids_of({5}, {1, 4, 5, 0, 3})));
  EXPECT_TRUE(same_bits(plan.source_offsets(), ids_of({4}, {0, 2, 3, 5})));
  const auto sources = plan.sources().span<std::int32_t>();
  const auto slots = plan.slots().span<std::int32_t>();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    EXPECT_EQ(slots[static_cast<std::size_t>(sources[i])], static_cast<std::int32_t>(i));
  }
}

// Every row of a group is the slot of its assignment, whatever does not fit or is no pick.
TEST(Plan, RowSourcesInvertTheSlotsOfOneRank) {
  const auto world = connect();
  const Tensor ids = testing::Random(3).expert_ids(
      {.num_tokens = 50, .top_k = 3, .num_experts = 8, .skew = 0.5, .none = 0.2});
  for (const std::int64_t alignment : {1, 4}) {
    for (const Sizing& sizing : {Sizing::exact(), Sizing::bounded(200), Sizing::bounded(64),
                                 Sizing::bounded(64, Overflow::drop), Sizing::bounded(0)}) {
      Planner planner(*world, ExpertPlacement::contiguous(8, 1), options_with(sizing, alignment));
      const Plan plan = planner.plan(ids);
      EXPECT_EQ(plan.row_sources().shape(), Shape{plan.row_capacity()});
      const auto sources = plan.row_sources().span<std::int32_t>();
      const auto slots = plan.slots().span<std::int32_t>();
      const auto offsets = plan.row_offsets().span<std::int32_t>();
      const auto rows = plan.group_rows().span<std::int32_t>();
      for (std::size_t e = 0; e < rows.size(); ++e) {
        for (std::int32_t r = offsets[e]; r < offsets[e] + rows[e]; ++r) {
          EXPECT_EQ(slots[static_cast<std::size_t>(sources[static_cast<std::size_t>(r)])], r);
        }
      }
    }
  }
  Planner planner(*world, ExpertPlacement::contiguous(8, 1), options_with());
  EXPECT_EQ(planner.plan(Tensor({0, 3}, Dtype::i32)).row_sources().shape(), Shape{0});
}

TEST(Plan, HasNoRowSourcesAtSeveralRanks) {
  run_ranks(2, [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::contiguous(4, 2), options_with());
    const Plan plan = planner.plan(ids_of({1, 2}, {0, 3}));
    EXPECT_EQ(error_of<Unsupported>([&] { (void)plan.row_sources(); }),
              "a plan over 2 ranks has no row_sources, because some rows come from other ranks' "
              "tokens: use Dispatcher::dispatch");
  });
}

TEST(Plan, CountsDistinctTokens) {
  run_ranks(2, [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::contiguous(4, 2), options_with());
    const Plan plan = planner.plan(ids_of({2, 3}, {2, 3, 0, 3, 2, -1}));
    EXPECT_EQ(plan.distinct_tokens(0, 1), 2);  // two tokens, though four assignments
    EXPECT_EQ(plan.distinct_tokens(1, 0), 1);
    EXPECT_EQ(plan.counts(1)[2], 2);
  });
}

TEST(Plan, EmptyExpertsHaveEmptyGroups) {
  const auto world = connect();
  Planner planner(*world, ExpertPlacement::contiguous(4, 1), options_with(Sizing::exact(), 8));
  const Plan plan = planner.plan(ids_of({2, 1}, {1, 3}));
  EXPECT_TRUE(same_bits(plan.row_offsets(), ids_of({5}, {0, 0, 8, 8, 16})));
  EXPECT_TRUE(same_bits(plan.group_rows(), ids_of({4}, {0, 1, 0, 1})));
}

class PlanTest : public ::testing::TestWithParam<RankCase> {};

// One rank's bad input is the same error on every rank, and the next plan works.
TEST_P(PlanTest, BadIdsAreTheSameErrorEverywhere) {
  on_ranks(GetParam(), [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::contiguous(4, comm.size()), options_with());
    const int guilty = comm.size() - 1;
    const auto plan_error = [&](std::initializer_list<std::int32_t> bad) {
      return error_of<InvalidArgument>([&] {
        (void)planner.plan(comm.rank() == guilty ? ids_of({2, 2}, bad) : ids_of({1, 2}, {0, 1}));
      });
    };
    const std::string who = "rank " + std::to_string(guilty);
    EXPECT_EQ(plan_error({0, 1, 2, 99}),
              who + ": expert_ids[1,1] is 99, which is neither -1 nor an expert of 4");
    EXPECT_EQ(plan_error({0, -2, 2, 3}),
              who + ": expert_ids[0,1] is -2, which is neither -1 nor an expert of 4");
    EXPECT_EQ(plan_error({0, 1, 3, 3}),
              who + ": expert_ids[1,1] is 3, which the token has picked already");
    EXPECT_EQ(plan_error({0, 1, 3, 2}), "no error");
  });
}

TEST_P(PlanTest, DisagreementIsTheSameErrorEverywhere) {
  if (GetParam().size == 1) return;  // one rank cannot disagree
  on_ranks(GetParam(), [](Communicator& comm) {
    const bool odd = comm.rank() == comm.size() - 1;
    const std::string who = "rank " + std::to_string(comm.size() - 1);
    const auto planner_error = [&](int num_experts, const PlanOptions& options) {
      return error_of<InvalidArgument>(
          [&] { Planner(comm, ExpertPlacement::contiguous(num_experts, comm.size()), options); });
    };
    PlanOptions options = options_with();
    EXPECT_EQ(planner_error(odd ? 9 : 8, options),
              "ranks disagree about num_experts: rank 0 has 8, " + who + " has 9");
    options.hidden = odd ? 8 : 4;
    EXPECT_EQ(planner_error(8, options),
              "ranks disagree about hidden: rank 0 has 4, " + who + " has 8");
    options = options_with();
    options.dtype = odd ? Dtype::bf16 : Dtype::f32;
    EXPECT_EQ(planner_error(8, options),
              "ranks disagree about dtype: rank 0 has 0, " + who + " has 1");
    options = options_with();
    options.sentinel_ids = odd ? SentinelIds::allow : SentinelIds::reject;
    EXPECT_EQ(planner_error(8, options),
              "ranks disagree about sentinel_ids: rank 0 has 0, " + who + " has 1");
    options = options_with(Sizing::exact(), odd ? 0 : 1);
    EXPECT_EQ(planner_error(8, options), who + ": alignment (0) must be positive and below 2^31");

    Planner planner(comm, ExpertPlacement::contiguous(8, comm.size()), options_with());
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                (void)planner.plan(Tensor::zeros({0, odd ? 3 : 2}, Dtype::i32));
              }),
              "ranks disagree about K: rank 0 has 2, " + who + " has 3");
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                (void)planner.plan(Tensor::zeros({1, 1}, odd ? Dtype::f32 : Dtype::i32));
              }),
              who + ": expert_ids must be [T, K] of i32 or i64, not f32 with 2 dimensions");
    Planner other(comm, ExpertPlacement::contiguous(8, comm.size()), options_with());
    const auto message = error_of<InvalidArgument>([&] {
      (void)(odd ? other : planner).plan(ids_of({1, 1}, {0}));
    });
    EXPECT_NE(message.find("ranks disagree about the layer they plan for"), std::string::npos)
        << message;
    (void)planner.plan(ids_of({1, 1}, {0}));  // and the next call works
  });
}

TEST_P(PlanTest, OptionsAreChecked) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto planner_error = [&](const PlanOptions& options, int ranks) {
      return error_of<InvalidArgument>(
          [&] { Planner(comm, ExpertPlacement::contiguous(4, ranks), options); });
    };
    EXPECT_EQ(planner_error({.hidden = 0}, comm.size()), "rank 0: hidden (0) must be positive");
    EXPECT_EQ(planner_error({.hidden = 4, .dtype = Dtype::i64}, comm.size()),
              "rank 0: rows are f32 or bf16, not i64");
    EXPECT_EQ(planner_error(options_with(Sizing::bounded(10), 4), comm.size()),
              "rank 0: capacity (10) must be a multiple of the alignment (4)");
    EXPECT_EQ(planner_error(options_with(), comm.size() + 1),
              "rank 0: the placement is for " + std::to_string(comm.size() + 1) +
                  " ranks, but the communicator has " + std::to_string(comm.size()));
    Planner planner(comm, ExpertPlacement::contiguous(4, comm.size()), options_with());
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                (void)planner.plan(Tensor({2, 0}, Dtype::i32));
              }),
              "rank 0: K (0) must be 1 to 1024");
  });
}

TEST_P(PlanTest, IdsInAnotherMemoryAreTheSameErrorEverywhere) {
  on_ranks(GetParam(), [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::contiguous(4, comm.size()), options_with());
    const int guilty = comm.size() - 1;
    Tensor ids = ids_of({1, 2}, {0, 1});
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                (void)planner.plan(comm.rank() == guilty ? testing::elsewhere(ids) : ids.view());
              }),
              "rank " + std::to_string(guilty) +
                  ": expert_ids is in gpu memory, but the device works in host memory; copy it "
                  "with Device::copy_of");
    (void)planner.plan(ids);  // and the next call works
  });
}

// Problems that the router found count as the rank's own.
TEST_P(PlanTest, ProblemsOfTheRouterAreTheSameErrorEverywhere) {
  on_ranks(GetParam(), [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::contiguous(4, comm.size()), options_with());
    const int guilty = comm.size() - 1;
    const Tensor none = words_of({-1, -1, 0, 0, 0});
    const auto error_with = [&](const Tensor& words, const Tensor& ids) {
      const Routing routing{.expert_ids = ids.clone(),
                            .weights = {},
                            .problems = (comm.rank() == guilty ? words : none).clone()};
      return error_of<InvalidArgument>([&] { (void)planner.plan(routing); });
    };
    const std::string who = "rank " + std::to_string(guilty);
    const Tensor good = ids_of({1, 2}, {0, 1});
    EXPECT_EQ(error_with(none, good), "no error");
    EXPECT_EQ(error_with(words_of({5, -1, 0, 0, 0}), good),
              who +
                  ": the router's logits of token 5 are not finite: x or the gate holds NaN or "
                  "infinity, or their product overflows");
    EXPECT_EQ(error_with(words_of({-1, 2, 1, 9, 0}), good),
              who + ": expert_ids[2,1] is 9, which is neither -1 nor an expert of 4");
    // The router's comes first, since a plan has not seen what that refused.
    EXPECT_EQ(error_with(words_of({-1, 2, 1, 3, 1}),
                         comm.rank() == guilty ? ids_of({1, 2}, {0, 7}) : ids_of({1, 2}, {0, 1})),
              who + ": expert_ids[2,1] is 3, which the token has picked already");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PlanTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(Plan, DuplicatesAreAllowedWhenAskedFor) {
  const auto world = connect();
  PlanOptions options = options_with();
  options.duplicate_ids = DuplicateIds::allow;
  Planner planner(*world, ExpertPlacement::contiguous(2, 1), options);
  const Plan plan = planner.plan(ids_of({2, 2}, {1, 1, 0, 1}));
  EXPECT_TRUE(same_bits(plan.slots(), ids_of({2, 2}, {1, 2, 0, 3})));
}

TEST(Plan, HasRowsThat32BitsCanName) {
  const auto world = connect();
  Planner planner(*world, ExpertPlacement::contiguous(3, 1),
                  options_with(Sizing::exact(), std::int64_t{1} << 30));
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              (void)planner.plan(ids_of({3, 1}, {0, 1, 2}));
            }),
            "rank 0 would receive 3221225472 rows; at most 2147483647 are supported on one rank");
  EXPECT_EQ(planner.plan(ids_of({1, 1}, {2})).num_rows(), std::int64_t{1} << 30);
}

TEST(Plan, AddsToTheWordsOfAStepAtOneRankAlone) {
  const Tensor problems = words_of({-1, 3, 0, 9, 0});
  for (const int num_ranks : {1, 2}) {
    run_ranks(num_ranks, [&](Communicator& comm) {
      PlanMaker planner(comm, ExpertPlacement::contiguous(2, num_ranks),
                        options_with(Sizing::bounded(2)), {});
      Tensor step = Tensor::zeros({kStepWords}, Dtype::i64);
      (void)planner.plan(ids_of({3, 1}, {0, 1, 1}),
                         {.of_router = {.words = problems}, .step = step});
      EXPECT_TRUE(same_bits(step, num_ranks == 1 ? words_of({3, 0, 1, 0, -1, 3, 0, 9, 0})
                                                 : Tensor::zeros({kStepWords}, Dtype::i64)));
    });
  }
}

TEST(Plan, ProblemsOfARoutingAreChecked) {
  const auto error_with = [](Tensor problems) {
    const auto world = connect();
    Planner planner(*world, ExpertPlacement::contiguous(2, 1), options_with());
    const Routing routing{.expert_ids = ids_of({1, 1}, {0}),
                          .weights = {},
                          .problems = std::move(problems),
                          .first_non_finite_token = 0};
    return error_of<InvalidArgument>([&] { (void)planner.plan(routing); });
  };
  Tensor words = words_of({-1, -1, 0, 0, 0});
  EXPECT_EQ(error_with(words.clone()), "no error");
  EXPECT_EQ(error_with({}),  // then the token is all there is
            "rank 0: the router's logits of token 0 are not finite: x or the gate holds NaN or "
            "infinity, or their product overflows");
  EXPECT_EQ(error_with(words_of({-1, -1})),
            "plan: problems is i64 [2], but must be contiguous i64 [5]");
  EXPECT_EQ(error_with(Tensor::of(testing::elsewhere(words))),
            "plan: problems [5] is in gpu memory, but the device works in host memory; copy it "
            "with Device::copy_of");
}

}  // namespace
}  // namespace switchyard::plan_test
