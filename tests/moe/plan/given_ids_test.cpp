// SPDX-License-Identifier: Apache-2.0
// Plans for ids of i64, and for sentinels: those of i32, and of −1.
#include <gtest/gtest.h>

#include "moe/plan/plans.h"
#include "support/compare.h"
#include "support/errors.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/wide_ids.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"

namespace switchyard::given_ids_test {
namespace {

using testing::error_of;
using testing::movers_of;
using testing::on_ranks;
using testing::options_with;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::wide_ids;

class GivenIds : public ::testing::TestWithParam<RankCase> {};

void expect_same(const Plan& actual, const Plan& expected) {
  EXPECT_TRUE(same_bits(actual.slots(), expected.slots()));
  EXPECT_TRUE(same_bits(actual.target_ranks(), expected.target_ranks()));
  EXPECT_TRUE(same_bits(actual.sources(), expected.sources()));
  EXPECT_TRUE(same_bits(actual.row_offsets(), expected.row_offsets()));
  EXPECT_FALSE(actual.status().bad_ids);
}

TEST_P(GivenIds, MayBeOf64BitsAndHaveSentinels) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const Tensor ids =
        Random(static_cast<std::uint64_t>(comm.rank()))
            .expert_ids(
                {.num_tokens = 30 * (comm.rank() % 3), .top_k = 3, .num_experts = 8, .none = 0.3});
    Tensor sentinels = ids.clone();
    for (auto& id : sentinels.span<std::int32_t>()) id = id == -1 ? 8 : id;
    const auto placement = ExpertPlacement::contiguous(8, comm.size());
    for (const MoverKind mover : movers_of(comm)) {
      for (const Sizing& sizing : {Sizing::exact(), Sizing::bounded(800)}) {
        DispatcherOptions options{.plan = options_with(sizing), .mover = mover};
        Dispatcher dispatcher(comm, placement, options);
        const Plan expected = dispatcher.plan(ids);
        expect_same(dispatcher.plan(wide_ids(ids)), expected);
        options.plan.sentinel_ids = SentinelIds::allow;
        Dispatcher tolerant(comm, placement, options);
        expect_same(tolerant.plan(ids), expected);
        expect_same(tolerant.plan(sentinels), expected);
        expect_same(tolerant.plan(wide_ids(ids, 8)), expected);
        expect_same(tolerant.plan(wide_ids(ids, std::int64_t{1} << 40)), expected);
        // Each rank may have its own.
        expect_same(tolerant.plan(comm.rank() % 2 == 0 ? wide_ids(ids, 9) : ids.clone()), expected);
      }
    }
  });
}

TEST_P(GivenIds, ThatAreBadAreOneErrorOnAllRanks) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const int last = comm.size() - 1;
    const auto error = [&](SentinelIds sentinels, std::int64_t id) {
      auto options = options_with();
      options.sentinel_ids = sentinels;
      Planner planner(comm, ExpertPlacement::contiguous(8, comm.size()), options);
      const Tensor ids =
          Tensor::from<std::int64_t>({2, 2}, {0, 1, 2, comm.rank() == last ? id : 3});
      return error_of<InvalidArgument>([&] { (void)planner.plan(ids); });
    };
    const auto refused = [&](const std::string& id) {
      return "rank " + std::to_string(last) + ": expert_ids[1,1] is " + id +
             ", which is neither -1 nor an expert of 8";
    };
    EXPECT_EQ(error(SentinelIds::reject, 8), refused("8"));
    EXPECT_EQ(error(SentinelIds::allow, 8), "no error");
    EXPECT_EQ(error(SentinelIds::reject, -2), refused("-2"));
    EXPECT_EQ(error(SentinelIds::allow, -2), refused("-2"));
    // The lower half of this id is a valid expert id. The error shows the highest 32-bit number.
    EXPECT_EQ(error(SentinelIds::reject, (std::int64_t{1} << 32) + 3), refused("2147483647"));
    EXPECT_EQ(error(SentinelIds::reject, 2),
              "rank " + std::to_string(last) +
                  ": expert_ids[1,1] is 2, which the token has picked already");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GivenIds, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::given_ids_test
