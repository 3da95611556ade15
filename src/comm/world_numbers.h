// SPDX-License-Identifier: Apache-2.0
// Numbers of ranks at fault. A rank outside a group is named there by −1 − its number in the job.
#pragma once

#include <algorithm>
#include <vector>

namespace switchyard {

// `world_ranks` are the numbers in the job of the ranks of a group.
inline int number_in_group(const std::vector<int>& world_ranks, int world_rank) {
  const auto here = std::ranges::find(world_ranks, world_rank);
  return here == world_ranks.end() ? -1 - world_rank : static_cast<int>(here - world_ranks.begin());
}

// The inverse.
inline int number_in_world(const std::vector<int>& world_ranks, int rank) {
  return rank < 0 ? -1 - rank : world_ranks[static_cast<std::size_t>(rank)];
}

}  // namespace switchyard
