// SPDX-License-Identifier: Apache-2.0
// Passes over the rows of groups: a team of warps takes one row at a time and looks up its group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/cuda/grouped_gemm.h"
#include "device/cuda/runtime/context.h"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {

constexpr int kTeamBlock = 128;  // threads
constexpr int kTeamBlockWarps = kTeamBlock / 32;

// One warp for short rows, a block for long ones. Depends on the row length alone, because the team
// size determines the order of sums over a row.
inline int team_warps(int lines) { return lines <= 128 ? 1 : kTeamBlockWarps; }

// Returns the grid size. Teams of large grids take several rows each, which balances the load.
// Blocks past the last group exit at once.
inline unsigned team_blocks(const Groups& groups, int warps, const Context& context) {
  const std::int64_t rows_at_once = kTeamBlockWarps / warps;
  const std::int64_t needed = (groups.row_capacity + rows_at_once - 1) / rows_at_once;
  return static_cast<unsigned>(
      std::min<std::int64_t>(needed, std::int64_t{64} * context.num_multiprocessors()));
}

// Returns the index of the last of `count` ascending keys that is at most `value`, or 0 if none is.
// Called by all lanes of a warp together.
template <typename Key>
__device__ int last_at_most(int count, std::int64_t value, Key key) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int first = 0;
  int last = count;
  while (last - first > 1) {
    const int step = (last - first + 31) / 32;
    const int probe = first + lane * step;
    const unsigned below = __ballot_sync(~0U, probe < last && key(probe) <= value);
    first += below == 0 ? 0 : (31 - __clz(static_cast<int>(below))) * step;
    last = min(first + step, last);
  }
  return first;
}

// Returns the group of a row, or −1 for a padding row. Of groups with the same offset, only the
// last can have rows.
__device__ inline int group_of(const Groups& groups, std::int64_t row) {
  const int group =
      last_at_most(groups.count, row, [&](int g) { return std::int64_t{groups.row_offsets[g]}; });
  const std::int64_t place = row - groups.row_offsets[group];
  return 0 <= place && place < groups.group_rows[group] ? group : -1;
}

// Calls body(row, group, thread of the team) for all rows of groups.
template <typename Body>
__device__ void for_each_row(const Groups& groups, int warps, Body body) {
  const int teams = kTeamBlockWarps / warps;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int thread = static_cast<int>(threadIdx.x) % (warps * 32);
  const std::int64_t end =
      min(groups.row_capacity,
          std::int64_t{groups.row_offsets[groups.count - 1]} + groups.group_rows[groups.count - 1]);
  for (std::int64_t row = std::int64_t{blockIdx.x} * teams + warp / warps; row < end;
       row += std::int64_t{gridDim.x} * teams) {
    const int group = group_of(groups, row);
    if (group >= 0) body(row, group, thread);
  }
}

// Returns the sum over a team's threads to each of them, added in a fixed order. Called by the
// whole team.
__device__ inline float team_sum(float value, int warps) {
  value = warp_sum(value);
  if (warps == 1) return value;
  __shared__ float sums[kTeamBlockWarps];
  __syncthreads();  // the previous row's sums have been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0F;
#pragma unroll
  for (int w = 0; w < kTeamBlockWarps; ++w) total += sums[w];
  return total;
}

}  // namespace switchyard::cuda
