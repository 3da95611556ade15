// SPDX-License-Identifier: Apache-2.0
// Plans whose ranks tell each other what they counted through their memory are those of hosts that
// do so.
#include <gtest/gtest.h>

#include <algorithm>

#include "moe/plan/plan_maker.h"
#include "moe/plan/plans.h"
#include "support/compare.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::peer_plan_test {
namespace {

using testing::error_of;
using testing::ids_of;
using testing::options_with;
using testing::same_bits;

// Ranks that tell each other what they counted through their memory, and through their hosts.
struct BothPlanners {
  BothPlanners(Communicator& comm, const PlanOptions& options)
      : host(comm, ExpertPlacement::contiguous(9, comm.size()), options, Device(), Exchange::host),
        peer(comm, ExpertPlacement::contiguous(9, comm.size()), options, Device(),
             Exchange::peer_memory) {}

  static Plan plan(PlanMaker& maker, const Tensor& ids, std::int64_t non_finite_token) {
    return plan_of(maker.plan(ids, maker.problems_of(non_finite_token)));
  }
  static std::string error(PlanMaker& maker, const Tensor& ids, std::int64_t non_finite_token) {
    return error_of<InvalidArgument>([&] { plan(maker, ids, non_finite_token).check(); });
  }

  PlanMaker host;
  PlanMaker peer;
};

void expect_same(const Plan& peer, const Plan& host) {
  EXPECT_TRUE(same_bits(peer.slots(), host.slots()));
  EXPECT_TRUE(same_bits(peer.target_ranks(), host.target_ranks()));
  EXPECT_TRUE(same_bits(peer.sources(), host.sources()));
  EXPECT_TRUE(same_bits(peer.source_offsets(), host.source_offsets()));
  EXPECT_TRUE(same_bits(peer.row_offsets(), host.row_offsets()));
  EXPECT_TRUE(same_bits(peer.group_rows(), host.group_rows()));
  EXPECT_EQ(peer.num_tokens(), host.num_tokens());
  EXPECT_EQ(peer.top_k(), host.top_k());
  EXPECT_EQ(peer.num_rows(), host.num_rows());
  EXPECT_EQ(peer.row_capacity(), host.row_capacity());
  const int num_ranks = host.placement().num_ranks();
  for (int r = 0; r < num_ranks; ++r) {
    EXPECT_TRUE(std::ranges::equal(peer.counts(r), host.counts(r)));
    for (int to = 0; to < num_ranks; ++to) {
      EXPECT_EQ(peer.distinct_tokens(r, to), host.distinct_tokens(r, to));
    }
  }
  const PlanStatus a = peer.status();
  const PlanStatus b = host.status();
  EXPECT_EQ(a.overflow, b.overflow);
  EXPECT_EQ(a.bad_ids_message, b.bad_ids_message);
  EXPECT_EQ(a.non_finite_message, b.non_finite_message);
  EXPECT_EQ(a.available_rows, b.available_rows);
  EXPECT_EQ(a.needed_rows, b.needed_rows);
  EXPECT_EQ(a.dropped, b.dropped);
  if (host.options().sizing.overflow() == Overflow::drop) return;
  for (int to = 0; to < num_ranks; ++to) {
    std::int64_t tokens = 0;
    for (int r = 0; r < num_ranks; ++r) tokens += host.distinct_tokens(r, to);
    EXPECT_EQ(a.needed_tokens[static_cast<std::size_t>(to)], tokens);
  }
}

class PlanInPeerMemory : public ::testing::TestWithParam<int> {};

TEST_P(PlanInPeerMemory, IsThePlanOfTheHosts) {
  constexpr std::int64_t kPlenty = 1000;  // tokens
  run_ranks(GetParam(), [](Communicator& comm) {
    for (const Sizing& sizing :
         {Sizing::exact(), Sizing::bounded(800), Sizing::bounded(16, Overflow::fail, kPlenty),
          Sizing::bounded(0, Overflow::fail, kPlenty), Sizing::bounded(16, Overflow::drop),
          Sizing::bounded(0, Overflow::drop), Sizing::bounded(16)}) {
      for (const std::int64_t alignment : {1, 4}) {
        BothPlanners planners(comm, options_with(sizing, alignment));
        for (const std::int64_t num_tokens : {3, 0, 30}) {
          const Tensor ids = testing::Random(static_cast<std::uint64_t>(5 + comm.rank()))
                                 .expert_ids({.num_tokens = comm.rank() == 1 ? 0 : num_tokens,
                                              .top_k = 3,
                                              .num_experts = 9,
                                              .skew = 0.5,
                                              .none = 0.2});
          const Plan peer = BothPlanners::plan(planners.peer, ids, -1);
          const Plan host = BothPlanners::plan(planners.host, ids, -1);
          const auto check = [](const Plan& plan) {
            return error_of<InvalidArgument>([&] { plan.check(); });
          };
          EXPECT_EQ(check(peer), check(host));
          // A rank that has no room for its tokens keeps no row.
          const auto tokens = std::ranges::max(peer.status().needed_tokens);
          if (sizing.is_bounded() && tokens > sizing.token_capacity()) continue;
          expect_same(peer, host);
        }
      }
    }
  });
}

TEST_P(PlanInPeerMemory, HasTheErrorsOfTheHostsAndThenGoesOn) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const bool is_last = comm.rank() == comm.size() - 1;
    const Tensor good = ids_of({2, 2}, {0, 1, 8, 3});
    for (const Sizing& sizing : {Sizing::exact(), Sizing::bounded(800)}) {
      BothPlanners planners(comm, options_with(sizing));
      for (const Tensor& bad : {ids_of({2, 2}, {0, 1, 9, 3}), ids_of({2, 2}, {0, 1, 3, 3}),
                                ids_of({2, 2}, {0, -7, 3, 1}), ids_of({1, 3}, {0, 1, 2})}) {
        const Tensor& ids = is_last ? bad : good;
        const auto error = BothPlanners::error(planners.peer, ids, -1);
        EXPECT_NE(error, "no error");
        EXPECT_EQ(error, BothPlanners::error(planners.host, ids, -1));
        EXPECT_EQ(BothPlanners::error(planners.peer, good, -1), "no error");
      }
      const std::int64_t token = is_last ? 1 : -1;
      const auto error = BothPlanners::error(planners.peer, good, token);
      EXPECT_NE(error.find("logits of token 1 are not finite"), std::string::npos) << error;
      EXPECT_EQ(error, BothPlanners::error(planners.host, good, token));
      if (!sizing.is_bounded()) continue;
      const Tensor bad = is_last ? ids_of({2, 2}, {0, 1, 9, 3}) : good.clone();
      expect_same(BothPlanners::plan(planners.peer, bad, token),
                  BothPlanners::plan(planners.host, bad, token));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, PlanInPeerMemory, ::testing::Values(2, 3, 8),
                         ::testing::PrintToStringParamName());

// Three tokens of each rank go to rank 1, with two rows each.
TEST(PlanInPeerMemory, NamesRankAndTokensThatHaveNoRoom) {
  run_ranks(3, [](Communicator& comm) {
    const Tensor ids = ids_of({3, 2}, {3, 4, 4, 5, 3, 5});
    for (const std::int64_t room : {1, 8, 9}) {
      PlanMaker planner(comm, ExpertPlacement::contiguous(9, 3),
                        options_with(Sizing::bounded(100, Overflow::fail, room)), Device(),
                        Exchange::peer_memory);
      const Plan plan = BothPlanners::plan(planner, ids, -1);
      EXPECT_EQ(plan.status().needed_tokens, (std::vector<std::int64_t>{0, 9, 0}));
      EXPECT_EQ(plan.status().available_tokens, room);
      EXPECT_EQ(plan.status().overflow, room < 9);
      const auto message = error_of<InvalidArgument>([&] { plan.check(); });
      if (room == 9) {
        EXPECT_EQ(message, "no error");
      } else {
        EXPECT_EQ(message, "overflow: rank 1 receives 9 tokens, but has room for " +
                               std::to_string(room) +
                               "; give the plan a token capacity of at least 9, or exact sizing");
      }
    }
  });
}

}  // namespace
}  // namespace switchyard::peer_plan_test
