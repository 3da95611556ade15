// SPDX-License-Identifier: Apache-2.0
// Builds and checks placements.
#include "switchyard/placement.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/require.h"

namespace switchyard {
namespace {

constexpr std::int32_t kNoOwner = -1;

void require_sizes(int num_experts, int num_ranks) {
  require(num_experts > 0, "num_experts ({}) must be positive", num_experts);
  require(num_ranks > 0, "num_ranks ({}) must be positive", num_ranks);
}

int num_of(std::size_t size, std::string_view what) {
  require(size <= std::numeric_limits<int>::max(), "{} {} are too many to place", size, what);
  return static_cast<int>(size);
}

}  // namespace

ExpertPlacement ExpertPlacement::contiguous(int num_experts, int num_ranks) {
  require_sizes(num_experts, num_ranks);
  std::vector<std::int32_t> owners;
  for (int r = 0; r < num_ranks; ++r) {
    const int count = num_experts / num_ranks + (r < num_experts % num_ranks ? 1 : 0);
    owners.insert(owners.end(), static_cast<std::size_t>(count), r);
  }
  return from_owners(std::move(owners), num_ranks);
}

ExpertPlacement ExpertPlacement::from_owners(std::vector<std::int32_t> owners, int num_ranks) {
  require_sizes(num_of(owners.size(), "experts"), num_ranks);
  ExpertPlacement placement;
  placement.experts_.resize(static_cast<std::size_t>(num_ranks));
  for (std::size_t e = 0; e < owners.size(); ++e) {
    require(owners[e] != kNoOwner, "expert {} has no owner", e);
    require(0 <= owners[e] && owners[e] < num_ranks,
            "the owner of expert {} is {}, which is not a rank of {}", e, owners[e], num_ranks);
    placement.experts_[static_cast<std::size_t>(owners[e])].push_back(static_cast<int>(e));
  }
  placement.owners_ = std::move(owners);
  return placement;
}

ExpertPlacement ExpertPlacement::from_lists(int num_experts,
                                            const std::vector<std::vector<int>>& experts_of_rank) {
  require_sizes(num_experts, num_of(experts_of_rank.size(), "ranks"));
  std::vector<std::int32_t> owners(static_cast<std::size_t>(num_experts), kNoOwner);
  for (std::size_t r = 0; r < experts_of_rank.size(); ++r) {
    for (const int e : experts_of_rank[r]) {
      require(0 <= e && e < num_experts, "rank {} lists expert {}, which is not one of {}", r, e,
              num_experts);
      auto& owner = owners[static_cast<std::size_t>(e)];
      require(owner == kNoOwner, "expert {} has two owners: ranks {} and {}", e, owner, r);
      owner = static_cast<std::int32_t>(r);
    }
  }
  return from_owners(std::move(owners), static_cast<int>(experts_of_rank.size()));
}

void ExpertPlacement::refuse_expert(int expert) const {
  throw InvalidArgument(
      fmt::format("expert {} is not one of the {} that are placed", expert, num_experts()));
}

void ExpertPlacement::refuse_rank(int rank) const {
  throw InvalidArgument(fmt::format("rank {} is not one of the placement's {}", rank, num_ranks()));
}

int ExpertPlacement::max_experts_per_rank() const {
  std::size_t most = 0;
  for (const auto& experts : experts_) most = std::max(most, experts.size());
  return static_cast<int>(most);
}

}  // namespace switchyard
