// SPDX-License-Identifier: Apache-2.0
// Plans whose ranks have room for so many rows: who overflows, and what is dropped.
#include <gtest/gtest.h>

#include "moe/plan/plans.h"
#include "support/compare.h"
#include "support/errors.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::bounded_plan_test {
namespace {

using testing::error_of;
using testing::ids_of;
using testing::options_with;
using testing::same_bits;

TEST(BoundedPlan, HasRoomForWhatFits) {
  const auto world = connect();
  Planner planner(*world, ExpertPlacement::contiguous(2, 1), options_with(Sizing::bounded(8), 2));
  const Plan plan = planner.plan(ids_of({3, 1}, {0, 1, 1}));
  EXPECT_EQ(plan.row_capacity(), 8);
  EXPECT_EQ(plan.num_rows(), 4);
  EXPECT_FALSE(plan.status().overflow);
  plan.check();
}

// Overflow if and only if a rank needs more than the capacity; the same verdict everywhere.
TEST(BoundedPlan, OverflowIsTheSameErrorEverywhere) {
  run_ranks(3, [](Communicator& comm) {
    for (const std::int64_t capacity : {4, 8, 12, 16}) {
      Planner planner(comm, ExpertPlacement::contiguous(3, 3),
                      options_with(Sizing::bounded(capacity), 4));
      // Expert 1 gets 3 + 3 + 3 = 9 rows: 12 aligned ones on rank 1.
      const Plan plan = planner.plan(ids_of({4, 1}, {1, 1, 1, 0}));
      EXPECT_EQ(plan.status().needed_rows, (std::vector<std::int64_t>{4, 12, 0}));
      EXPECT_EQ(plan.status().available_rows, capacity);
      EXPECT_EQ(plan.status().overflow, capacity < 12);
      const auto message = error_of<InvalidArgument>([&] { plan.check(); });
      if (capacity >= 12) {
        EXPECT_EQ(message, "no error");
      } else {
        EXPECT_EQ(message, "overflow: rank 1 needs 12 rows, but the capacity is " +
                               std::to_string(capacity) +
                               " on every rank; give the plan a capacity of at least 12, or exact "
                               "sizing");
      }
      EXPECT_LE(plan.num_rows(), capacity);
      for (const auto slot : plan.slots().span<std::int32_t>()) EXPECT_LT(slot, capacity);
    }
  });
}

TEST(BoundedPlan, DropKeepsTheLowestTokensOfEachExpert) {
  run_ranks(2, [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::from_owners({0, 0, 1}, 2),
                    options_with(Sizing::bounded(6, Overflow::drop)));
    // Expert 0 gets 3 + 3 = 6 rows, expert 1 gets 1 + 1 = 2: together 8, two too many.
    const Plan plan = planner.plan(ids_of({4, 1}, {0, 0, 1, 0}));
    plan.check();
    EXPECT_TRUE(plan.status().overflow);
    EXPECT_EQ(plan.status().dropped, (std::vector<std::int64_t>{2, 0}));
    const Tensor expected =
        comm.rank() == 0 ? ids_of({4, 1}, {0, 1, 4, 2}) : ids_of({4, 1}, {3, -1, 5, -1});
    EXPECT_TRUE(same_bits(plan.slots(), expected));
    if (comm.rank() == 0) {
      EXPECT_TRUE(same_bits(plan.row_offsets(), ids_of({3}, {0, 4, 6})));
    }
  });
}

// Room that alignment leaves over is used: as many whole groups as fit are kept.
TEST(BoundedPlan, DropUsesTheCapacityWithAlignment) {
  const auto world = connect();
  const auto status_of = [&](int num_experts, std::int64_t alignment, std::int64_t capacity,
                             std::int64_t num_tokens) {
    Planner planner(*world, ExpertPlacement::contiguous(num_experts, 1),
                    options_with(Sizing::bounded(capacity, Overflow::drop), alignment));
    Tensor ids({num_tokens, 1}, Dtype::i32);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      ids.span<std::int32_t>()[static_cast<std::size_t>(t)] =
          static_cast<std::int32_t>(t % num_experts);
    }
    const Plan plan = planner.plan(ids);
    return std::pair(plan.status().dropped[0], plan.num_rows());
  };
  // Eight groups of 100 rows, each 128 aligned, and room for seven of them.
  EXPECT_EQ(status_of(8, 128, 896, 800), (std::pair<std::int64_t, std::int64_t>(100, 896)));
  EXPECT_EQ(status_of(8, 128, 1920, 4000), (std::pair<std::int64_t, std::int64_t>(2080, 1920)));
  EXPECT_EQ(status_of(3, 1, 10, 30), (std::pair<std::int64_t, std::int64_t>(20, 10)));
  EXPECT_EQ(status_of(3, 4, 0, 30), (std::pair<std::int64_t, std::int64_t>(30, 0)));
}

TEST(BoundedPlan, BadIdsAreAStatus) {
  run_ranks(2, [](Communicator& comm) {
    Planner planner(comm, ExpertPlacement::contiguous(2, 2), options_with(Sizing::bounded(8)));
    const Plan plan = planner.plan(ids_of({1, 2}, {0, comm.rank() == 1 ? 7 : 1}));
    EXPECT_TRUE(plan.status().bad_ids);
    EXPECT_EQ(error_of<InvalidArgument>([&] { plan.check(); }),
              "rank 1: expert_ids[0,1] is 7, which is neither -1 nor an expert of 2");
    if (comm.rank() == 1) {
      EXPECT_EQ(plan.slots().span<std::int32_t>()[1], -1);
    }
  });
}

}  // namespace
}  // namespace switchyard::bounded_plan_test
