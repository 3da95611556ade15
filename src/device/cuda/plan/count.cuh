// SPDX-License-Identifier: Apache-2.0
// Counting the assignments of a block of threads. Each warp counts one run of tokens; prefix sums
// over the runs then turn its positions into those of a single walk over all ids.
#pragma once

#include <cstdint>

#include "device/cuda/plan/assignments.cuh"
#include "device/cuda/whole_sums.cuh"
#include "device/device_backend.h"

namespace switchyard::cuda {

constexpr unsigned kNoneBad = 0xffffffffU;

struct Count {
  Assignments all;
  const std::int32_t* owners = nullptr;
  int num_experts = 0;
  int num_ranks = 0;
  bool allow_duplicates = false;
  std::int64_t run_tokens = 0;  // per warp
  int num_blocks = 0;
  unsigned block_assignments = 0;  // of all blocks but the last
  // The columns count the assignments of every expert, then the tokens of every rank. A single
  // block needs neither bases nor block_bad.
  std::int32_t* far_counters = nullptr;  // [blocks, warps, columns]; null: in shared memory
  std::int32_t* block_counts = nullptr;  // [blocks, columns]
  std::int32_t* block_bases = nullptr;   // [blocks, columns]
  std::int32_t* block_bad = nullptr;     // [blocks]: the first bad assignment, or kNoneBad
  std::int32_t* positions = nullptr;
  std::int32_t* token_positions = nullptr;  // or null
  std::int32_t* counts = nullptr;
  std::int32_t* distinct_tokens = nullptr;
  std::int64_t* problems = nullptr;

  __host__ __device__ int num_columns() const { return num_experts + num_ranks; }
  __device__ bool in_range(std::int32_t id) const {
    return static_cast<unsigned>(id) < static_cast<unsigned>(num_experts);
  }
  __device__ void set_total(int column, std::int32_t total) const {
    if (column < num_experts) {
      counts[column] = total;
    } else {
      distinct_tokens[column - num_experts] = total;
    }
  }
  // Adds `bases`, the counts before a run or block, to the positions of one of its assignments.
  __device__ void add_bases(unsigned assignment, const std::int32_t* bases) const {
    const std::int32_t position = positions[assignment];
    if (position < 0) return;
    const std::int32_t id = all.id(assignment);
    positions[assignment] = position + bases[id];
    if (token_positions != nullptr) {
      token_positions[assignment] += bases[num_experts + owners[id]];
    }
  }
};

// The counters that a warp updates.
struct Counters {
  std::int32_t* columns = nullptr;  // of this warp
  unsigned* first_bad = nullptr;    // of the block
};

// The assignment held by one lane.
struct Pick {
  std::int64_t token = 0;
  int k = 0;
  int first_k = 0;  // first k in the lanes; earlier assignments of the token are in no lane
  bool is_there = false;
  unsigned before = 0;  // lanes that hold earlier assignments of the same token
};

__device__ inline bool has_before(const std::int32_t* row, int end, std::int32_t id) {
  for (int k = 0; k < end; ++k) {
    if (row[k] == id) return true;
  }
  return false;
}

__device__ inline bool has_rank_before(const Count& c, const std::int32_t* row, int end, int rank) {
  for (int k = 0; k < end; ++k) {
    if (c.in_range(row[k]) && c.owners[row[k]] == rank) return true;
  }
  return false;
}

// Counts a token at a rank on its first pick there. Returns how many tokens were counted before it.
__device__ inline std::int32_t count_token(const Count& c, const Pick& pick, int rank,
                                           std::int32_t* tokens) {
  const int lane = lane_of_thread();
  const unsigned same = __match_any_sync(kAllLanes, rank);
  const bool is_first = rank >= 0 && (same & pick.before) == 0 &&
                        !has_rank_before(c, c.all.row(pick.token), pick.first_k, rank);
  const unsigned firsts = __ballot_sync(kAllLanes, is_first) & same;
  const std::int32_t before = rank >= 0 ? tokens[rank] : 0;
  __syncwarp();
  if (is_first && lane == __ffs(static_cast<int>(firsts)) - 1) {
    tokens[rank] = before + __popc(firsts);
  }
  __syncwarp();
  // If no lane holds a first pick, all lanes hold one token, which an earlier pick has counted.
  const unsigned earlier_tokens = lanes_below(lane) & ~pick.before;
  return firsts == 0 ? before - 1 : before + __popc(firsts & earlier_tokens);
}

// Must be called by all lanes of a warp, which hold assignments in order.
__device__ inline void count_picks_of_lanes(const Count& c, const Pick& pick,
                                            const Counters& counters) {
  const int lane = lane_of_thread();
  const std::int32_t* row = c.all.row(pick.token);
  const std::int32_t id = pick.is_there ? row[pick.k] : -1;
  const bool in_range = c.in_range(id);
  const unsigned same = __match_any_sync(kAllLanes, id);
  const bool is_counted =
      in_range &&
      (c.allow_duplicates || ((same & pick.before) == 0 && !has_before(row, pick.first_k, id)));
  const unsigned counted = __ballot_sync(kAllLanes, is_counted) & same;
  const std::int32_t before = is_counted ? counters.columns[id] : 0;
  __syncwarp();
  if (is_counted && lane == __ffs(static_cast<int>(counted)) - 1) {
    counters.columns[id] = before + __popc(counted);
  }
  const std::int32_t tokens_before =
      count_token(c, pick, is_counted ? c.owners[id] : -1, counters.columns + c.num_experts);
  if (!pick.is_there) return;
  const auto assignment = static_cast<unsigned>(pick.token) * c.all.top_k + pick.k;
  c.positions[assignment] = is_counted ? before + __popc(counted & lanes_below(lane)) : -1;
  if (c.token_positions != nullptr) {
    c.token_positions[assignment] = is_counted ? tokens_before : -1;
  }
  if (!is_counted && id != -1) atomicMin(counters.first_bad, assignment);
}

// Counts as many whole tokens at a time as a warp has lanes for. A token with more than 32 picks is
// counted 32 picks at a time.
__device__ inline void count_run(const Count& c, std::int64_t first, std::int64_t end,
                                 const Counters& counters) {
  const int lane = lane_of_thread();
  const int top_k = static_cast<int>(c.all.top_k);
  const int at_once = top_k < kWarpLanes ? kWarpLanes / top_k : 1;
  const int own = top_k < kWarpLanes ? lane / top_k : 0;  // equals at_once in leftover lanes
  const int first_lane = own * top_k;
  for (std::int64_t t = first; t < end; t += at_once) {
    const std::int64_t token = min(t + own, end - 1);
    for (int first_k = 0; first_k < top_k; first_k += kWarpLanes) {
      const int k = first_k + lane - first_lane;
      const bool is_there = own < at_once && t + own < end && k < top_k;
      const unsigned before = lanes_below(lane) & ~lanes_below(first_lane);
      count_picks_of_lanes(c, {token, k, first_k, is_there, before}, counters);
    }
  }
}

// Turns positions within a run into positions within the block.
__device__ inline void add_run_bases(const Count& c, std::int64_t first, std::int64_t end,
                                     const std::int32_t* bases) {
  const auto last = static_cast<unsigned>(end) * c.all.top_k;
  for (unsigned i = static_cast<unsigned>(first) * c.all.top_k + lane_of_thread(); i < last;
       i += kWarpLanes) {
    c.add_bases(i, bases);
  }
}

// Exclusive prefix sum of counters [warps, columns] over the warps, in place. Also writes the
// totals of the block.
__device__ inline void scan_warps(const Count& c, std::int32_t* counters) {
  const std::int64_t columns = c.num_columns();
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += blockDim.x) {
    std::int32_t sum = 0;
    for (int w = 0; w < warps_of_block(); ++w) {
      std::int32_t& counter = counters[w * columns + i];
      const std::int32_t count = counter;
      counter = sum;
      sum += count;
    }
    c.block_counts[blockIdx.x * columns + i] = sum;
    if (c.num_blocks == 1) c.set_total(i, sum);
  }
}

// Called by one thread. `bad` is the first bad assignment, or kNoneBad.
__device__ inline void note_first_bad(const Count& c, unsigned bad) {
  if (bad == kNoneBad || c.problems[kBadToken] >= 0) return;
  const std::int32_t id = c.all.id(bad);
  c.problems[kBadToken] = bad / c.all.top_k;
  c.problems[kBadK] = bad % c.all.top_k;
  c.problems[kBadId] = id;
  c.problems[kBadIsDuplicate] = c.in_range(id) ? 1 : 0;
}

// Counts the tokens of a block. `counters` [warps, columns] are the block's own. Must be called by
// all threads. A single block completes all counts; otherwise they are those of the block. The
// other threads see all results but the positions, for which they need a barrier.
__device__ inline void count_block(const Count& c, std::int32_t* counters) {
  __shared__ unsigned first_bad;
  const std::int64_t num_counters = static_cast<std::int64_t>(warps_of_block()) * c.num_columns();
  for (std::int64_t i = threadIdx.x; i < num_counters; i += blockDim.x) counters[i] = 0;
  if (threadIdx.x == 0) first_bad = kNoneBad;
  __syncthreads();

  const std::int64_t run =
      static_cast<std::int64_t>(blockIdx.x) * warps_of_block() + warp_of_thread();
  const std::int64_t first = min(run * c.run_tokens, c.all.num_tokens);
  const std::int64_t end = min(first + c.run_tokens, c.all.num_tokens);
  std::int32_t* const own =
      counters + static_cast<std::int64_t>(warp_of_thread()) * c.num_columns();
  count_run(c, first, end, {own, &first_bad});
  __syncthreads();
  scan_warps(c, counters);
  if (threadIdx.x == 0 && c.num_blocks == 1) note_first_bad(c, first_bad);
  if (threadIdx.x == 0 && c.num_blocks > 1) {
    c.block_bad[blockIdx.x] = static_cast<std::int32_t>(first_bad);
  }
  __syncthreads();
  add_run_bases(c, first, end, own);
}

// Fills in what does not depend on how the tokens are cut.
inline Count count_of(const CountAssignments& args) {
  return {.all = assignments_of(args.expert_ids),
          .owners = elements<std::int32_t>(args.owners),
          .num_experts = static_cast<int>(args.owners.rows()),
          .num_ranks = static_cast<int>(args.distinct_tokens.rows()),
          .allow_duplicates = args.allow_duplicates,
          .positions = elements<std::int32_t>(args.positions),
          .token_positions =
              args.token_positions ? elements<std::int32_t>(*args.token_positions) : nullptr,
          .counts = elements<std::int32_t>(args.counts),
          .distinct_tokens = elements<std::int32_t>(args.distinct_tokens),
          .problems = elements<std::int64_t>(args.problems)};
}

}  // namespace switchyard::cuda
