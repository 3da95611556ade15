// SPDX-License-Identifier: Apache-2.0
#include "switchyard/placement.h"

#include <gtest/gtest.h>

#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::placement_test {
namespace {

using testing::error_of;

std::vector<int> experts(const ExpertPlacement& placement, int rank) {
  const auto span = placement.experts_of(rank);
  return {span.begin(), span.end()};
}

TEST(ExpertPlacement, ContiguousGivesTheFirstRanksOneMore) {
  const auto placement = ExpertPlacement::contiguous(10, 4);
  EXPECT_EQ(experts(placement, 0), (std::vector{0, 1, 2}));
  EXPECT_EQ(experts(placement, 1), (std::vector{3, 4, 5}));
  EXPECT_EQ(experts(placement, 2), (std::vector{6, 7}));
  EXPECT_EQ(experts(placement, 3), (std::vector{8, 9}));
  EXPECT_EQ(placement.owner(5), 1);
  EXPECT_EQ(placement.max_experts_per_rank(), 3);
}

TEST(ExpertPlacement, RanksMayOwnNothing) {
  const auto placement = ExpertPlacement::contiguous(2, 4);
  EXPECT_EQ(experts(placement, 1), (std::vector{1}));
  EXPECT_TRUE(experts(placement, 3).empty());
}

TEST(ExpertPlacement, TakesAnyMap) {
  const auto by_owner = ExpertPlacement::from_owners({1, 0, 1, 2}, 3);
  const auto by_list = ExpertPlacement::from_lists(4, {{1}, {2, 0}, {3}});
  EXPECT_EQ(by_owner, by_list);
  EXPECT_EQ(experts(by_list, 1), (std::vector{0, 2}));  // ascending, however listed
}

TEST(ExpertPlacement, KnowsItsOwnExpertsAndRanksAlone) {
  const auto placement = ExpertPlacement::contiguous(4, 2);
  EXPECT_EQ(testing::error_of<InvalidArgument>([&] { (void)placement.owner(99); }),
            "expert 99 is not one of the 4 that are placed");
  EXPECT_EQ(testing::error_of<InvalidArgument>([&] { (void)placement.experts_of(-1); }),
            "rank -1 is not one of the placement's 2");
}

TEST(ExpertPlacement, SaysWhatIsWrong) {
  const auto list_error = [](int num_experts, const std::vector<std::vector<int>>& lists) {
    return error_of<InvalidArgument>([&] { ExpertPlacement::from_lists(num_experts, lists); });
  };
  EXPECT_EQ(list_error(3, {{0}, {2}}), "expert 1 has no owner");
  EXPECT_EQ(list_error(3, {{0, 1}, {1, 2}}), "expert 1 has two owners: ranks 0 and 1");
  EXPECT_EQ(list_error(3, {{0, 3}, {1, 2}}), "rank 0 lists expert 3, which is not one of 3");
  const auto owner_error = [](std::vector<std::int32_t> owners, int num_ranks) {
    return error_of<InvalidArgument>([&] { ExpertPlacement::from_owners(owners, num_ranks); });
  };
  EXPECT_EQ(owner_error({0, 2}, 2), "the owner of expert 1 is 2, which is not a rank of 2");
  EXPECT_EQ(owner_error({0, -1}, 2), "expert 1 has no owner");
  EXPECT_EQ(owner_error({}, 2), "num_experts (0) must be positive");
  EXPECT_EQ(owner_error({0}, 0), "num_ranks (0) must be positive");
}

}  // namespace
}  // namespace switchyard::placement_test
