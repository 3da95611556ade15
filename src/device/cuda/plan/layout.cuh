// SPDX-License-Identifier: Apache-2.0
// Laying out a plan in one block: where each expert's group begins, and how many rows it keeps.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "device/cuda/plan/assignments.cuh"
#include "device/cuda/whole_sums.cuh"
#include "device/device_backend.h"

namespace switchyard::cuda {

constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kNoLevel = std::numeric_limits<std::int64_t>::max();

// One row per rank, `stride` elements apart.
template <typename T>
struct RankRows {
  const T* first = nullptr;  // or null
  std::int64_t stride = 0;
  int count = 0;
  int columns = 0;

  __device__ const T* row(int r) const { return first + r * stride; }
  // Sums a column over the first `rows` rows.
  __device__ std::int64_t column_sum(int rows, int column) const {
    std::int64_t sum = 0;
    for (int r = 0; r < rows; ++r) sum += row(r)[column];
    return sum;
  }
};

template <typename T>
RankRows<T> rank_rows(const ConstTensorView& view) {
  return {elements<T>(view), view.row_stride(), static_cast<int>(view.rows()),
          static_cast<int>(view.shape()[1])};
}
template <typename T>
RankRows<T> rank_rows(const std::optional<ConstTensorView>& view) {
  return view ? rank_rows<T>(*view) : RankRows<T>{};
}

struct Layout {
  RankRows<std::int32_t> counts;
  RankRows<std::int32_t> distinct_tokens;
  RankRows<std::int64_t> must_agree;
  RankRows<std::int64_t> problems;
  const std::int32_t* experts_by_rank = nullptr;
  const std::int32_t* rank_offsets = nullptr;
  int num_experts = 0;
  int num_ranks = 0;
  int rank = 0;
  std::int64_t alignment = 1;
  bool is_bounded = false;
  bool drops = false;
  std::int64_t capacity = 0;
  std::int64_t token_capacity = 0;
  std::int64_t* totals = nullptr;  // [E], over all ranks
  std::int32_t* expert_offsets = nullptr;
  std::int32_t* rows_before = nullptr;
  std::int32_t* kept_rows = nullptr;
  std::int32_t* row_offsets = nullptr;
  std::int32_t* group_rows = nullptr;
  std::int32_t* source_offsets = nullptr;
  std::int32_t* token_offsets = nullptr;  // or null
  std::int64_t* overflow = nullptr;
  std::int64_t* used_rows = nullptr;  // [ranks], as are the next three
  std::int64_t* needed_rows = nullptr;
  std::int64_t* dropped = nullptr;
  std::int64_t* needed_tokens = nullptr;
  std::int64_t* step = nullptr;

  __device__ std::int64_t round_up(std::int64_t rows) const {
    return (rows + alignment - 1) / alignment * alignment;
  }
  __device__ bool has_token_room(int r) const {
    return !is_bounded || needed_tokens[r] <= token_capacity;
  }
};

// True if all ranks have the same words. Must be called by all threads.
__device__ inline bool ranks_agree(const RankRows<std::int64_t>& words) {
  bool agree = true;
  for (int i = static_cast<int>(threadIdx.x); i < words.columns; i += blockDim.x) {
    for (int r = 1; r < words.count; ++r) agree = agree && words.row(r)[i] == words.row(0)[i];
  }
  return __syncthreads_and(static_cast<int>(agree)) != 0;
}

// Counts the tokens that each rank receives from the first `counted` ranks, which are all or none.
__device__ inline void count_tokens(const Layout& l, int counted) {
  for (int r = static_cast<int>(threadIdx.x); r < l.num_ranks; r += blockDim.x) {
    const bool given = l.distinct_tokens.first != nullptr;
    l.needed_tokens[r] = given ? l.distinct_tokens.column_sum(counted, r) : 0;
    if (!given || l.token_offsets == nullptr) continue;
    const auto before = l.distinct_tokens.column_sum(min(l.rank, counted), r);
    l.token_offsets[r] = static_cast<std::int32_t>(min(before, kMostRows));
  }
}

// The experts of a rank, and how many rows they keep if they do not all fit.
struct RankExperts {
  const std::int32_t* experts = nullptr;
  int count = 0;
  std::int64_t capacity = 0;
  bool is_cut = false;
  std::int64_t level = 0;         // rows that every expert is cut to
  std::int64_t extra_blocks = 0;  // of `alignment` rows; the first experts that are cut get one
};

// Returns the rows of a rank's groups if each is cut to `level`. All threads must call this and the
// next three functions.
__device__ inline std::int64_t rows_at_level(const Layout& l, const RankExperts& own,
                                             std::int64_t level, std::int64_t* shared) {
  std::int64_t rows = 0;
  for (int i = static_cast<int>(threadIdx.x); i < own.count; i += blockDim.x) {
    rows += l.round_up(min(l.totals[own.experts[i]], level));
  }
  return block_sums(rows, shared).total;
}

// Finds the highest level such that a rank's groups, each cut to it, fit into its capacity.
__device__ inline void find_level(const Layout& l, RankExperts& own, std::int64_t* shared) {
  std::int64_t low = 0;
  std::int64_t high = own.capacity;
  while (low < high) {
    const std::int64_t level = (low + high + 1) / 2;
    if (rows_at_level(l, own, level, shared) <= own.capacity) {
      low = level;
    } else {
      high = level - 1;
    }
  }
  own.level = low;
  own.extra_blocks = (own.capacity - rows_at_level(l, own, low, shared)) / l.alignment;
}

struct Placed {
  std::int64_t used = 0;
  std::int64_t dropped = 0;
};

__device__ inline Placed place_groups(const Layout& l, const RankExperts& own, bool is_this_rank,
                                      std::int64_t* shared) {
  std::int64_t end = 0;
  std::int64_t cut_before = 0;
  std::int64_t dropped_of_thread = 0;
  for (int first = 0; first < own.count; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int e = i < own.count ? own.experts[i] : -1;
    const std::int64_t wanted = e >= 0 ? l.totals[e] : 0;
    std::int64_t kept = wanted;
    if (own.is_cut) {
      kept = min(wanted, own.level);
      const bool is_cut = kept < wanted;
      const auto cut = block_sums<std::int64_t>(is_cut ? 1 : 0, shared);
      if (is_cut && cut_before + cut.before < own.extra_blocks) {
        kept = min(wanted, l.round_up(kept) + l.alignment);
      }
      cut_before += cut.total;
    }
    const auto rows = block_sums(l.round_up(kept), shared);
    const std::int64_t begin = min(end + rows.before, own.capacity);
    kept = min(kept, own.capacity - begin);
    end += rows.total;
    if (e < 0) continue;
    dropped_of_thread += wanted - kept;
    l.expert_offsets[e] = static_cast<std::int32_t>(begin);
    l.kept_rows[e] = static_cast<std::int32_t>(kept);
    if (!is_this_rank) continue;
    l.row_offsets[i] = static_cast<std::int32_t>(begin);
    l.group_rows[i] = static_cast<std::int32_t>(kept);
  }
  return {min(end, own.capacity), block_sums(dropped_of_thread, shared).total};
}

// Returns the rows that the rank needs. Rows beyond 2³¹ − 1 get no slots: the caller reads the
// layout words and rejects the plan.
__device__ inline std::int64_t lay_out_rank(const Layout& l, int r, std::int64_t* shared) {
  RankExperts own{.experts = l.experts_by_rank + l.rank_offsets[r],
                  .count = l.rank_offsets[r + 1] - l.rank_offsets[r]};
  const std::int64_t needed = rows_at_level(l, own, kNoLevel, shared);
  own.capacity = !l.has_token_room(r) ? 0 : l.is_bounded ? l.capacity : min(needed, kMostRows);
  own.is_cut = l.drops && needed > own.capacity;
  if (own.is_cut) find_level(l, own, shared);
  const Placed placed = place_groups(l, own, r == l.rank, shared);
  if (threadIdx.x == 0) {
    l.used_rows[r] = placed.used;
    l.needed_rows[r] = needed;
    l.dropped[r] = placed.dropped;
    if (r == l.rank) l.row_offsets[own.count] = static_cast<std::int32_t>(placed.used);
  }
  return needed;
}

// Called by one thread, as is the next function.
__device__ inline void add_first_problem(const Layout& l) {
  if (l.step[kStepHasProblem] != 0) return;
  for (int r = 0; r < l.problems.count; ++r) {
    const std::int64_t* const problems = l.problems.row(r);
    if (problems[kNonFiniteToken] < 0 && problems[kBadToken] < 0) continue;
    l.step[kStepHasProblem] = 1;
    l.step[kStepProblemRank] = r;
    for (int i = 0; i < kProblemWords; ++i) l.step[kStepProblem + i] = problems[i];
    return;
  }
}

__device__ inline void say_what_happened(const Layout& l, std::int64_t most_needed) {
  bool overflows = l.is_bounded && most_needed > l.capacity;
  std::int64_t most_tokens = 0;
  for (int r = 0; r < l.num_ranks; ++r) {
    overflows = overflows || !l.has_token_room(r);
    most_tokens = max(most_tokens, l.needed_tokens[r]);
  }
  *l.overflow = overflows ? 1 : 0;
  if (l.step == nullptr) return;
  l.step[kStepMostNeeded] = max(l.step[kStepMostNeeded], most_needed);
  l.step[kStepMostTokens] = max(l.step[kStepMostTokens], most_tokens);
  add_first_problem(l);
}

// Lays out the groups of all ranks. Must be called by all threads of a single block, which need a
// barrier before they read what others have written.
__device__ inline void lay_out_ranks(const Layout& l) {
  __shared__ std::int64_t shared[kWarpLanes];
  const int counted = ranks_agree(l.must_agree) ? l.num_ranks : 0;
  for (int e = static_cast<int>(threadIdx.x); e < l.num_experts; e += blockDim.x) {
    l.totals[e] = l.counts.column_sum(counted, e);
  }
  count_tokens(l, counted);
  __syncthreads();
  std::int64_t most_needed = 0;
  for (int r = 0; r < l.num_ranks; ++r) most_needed = max(most_needed, lay_out_rank(l, r, shared));
  if (threadIdx.x == 0) say_what_happened(l, most_needed);
  if (counted > 0) {
    block_offsets(l.counts.row(l.rank), l.num_experts, l.source_offsets, shared);
  } else {
    for (int e = static_cast<int>(threadIdx.x); e <= l.num_experts; e += blockDim.x) {
      l.source_offsets[e] = 0;
    }
  }
  __syncthreads();  // other threads have written kept_rows
  for (int e = static_cast<int>(threadIdx.x); e < l.num_experts; e += blockDim.x) {
    const auto before = l.counts.column_sum(min(l.rank, counted), e);
    l.rows_before[e] = static_cast<std::int32_t>(min(before, std::int64_t{l.kept_rows[e]}));
  }
}

// `totals` [E] is scratch memory.
inline Layout layout_of(const LayOut& args, std::int64_t* totals) {
  const auto num_experts = static_cast<int>(args.owners.rows());
  const auto num_ranks = static_cast<int>(args.rank_offsets.rows()) - 1;
  auto* const words = elements<std::int64_t>(args.layout);
  return {
      .counts = rank_rows<std::int32_t>(args.counts),
      .distinct_tokens = rank_rows<std::int32_t>(args.distinct_tokens),
      .must_agree = rank_rows<std::int64_t>(args.must_agree),
      .problems = rank_rows<std::int64_t>(args.problems),
      .experts_by_rank = elements<std::int32_t>(args.experts_by_rank),
      .rank_offsets = elements<std::int32_t>(args.rank_offsets),
      .num_experts = num_experts,
      .num_ranks = num_ranks,
      .rank = args.rank,
      .alignment = args.alignment,
      .is_bounded = args.sizing.is_bounded(),
      .drops = args.sizing.is_bounded() && args.sizing.overflow() == Overflow::drop,
      .capacity = args.sizing.capacity(),
      .token_capacity = args.sizing.token_capacity(),
      .totals = totals,
      .expert_offsets = elements<std::int32_t>(args.expert_offsets),
      .rows_before = elements<std::int32_t>(args.rows_before),
      .kept_rows = elements<std::int32_t>(args.kept_rows),
      .row_offsets = elements<std::int32_t>(args.row_offsets),
      .group_rows = elements<std::int32_t>(args.group_rows),
      .source_offsets = elements<std::int32_t>(args.source_offsets),
      .token_offsets = args.token_offsets ? elements<std::int32_t>(*args.token_offsets) : nullptr,
      .overflow = words + kOverflowWord,
      .used_rows = words + used_rows_word(num_ranks, 0),
      .needed_rows = words + needed_rows_word(num_ranks, 0),
      .dropped = words + dropped_word(num_ranks, 0),
      .needed_tokens = words + needed_tokens_word(num_ranks, 0),
      .step = args.step ? elements<std::int64_t>(*args.step) : nullptr};
}

}  // namespace switchyard::cuda
