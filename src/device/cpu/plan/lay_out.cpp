// SPDX-License-Identifier: Apache-2.0
// Lays out the groups of all experts at their owners and finds how many rows of each fit.
#include <algorithm>
#include <limits>
#include <vector>

#include "device/cpu/experts/panels.h"
#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

using Numbers = std::span<const std::int64_t>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Returns row r of a matrix whose rows may be strided.
template <typename T>
std::span<const T> rank_row(const ConstTensorView& matrix, std::int64_t r) {
  return matrix.slice(r, r + 1).span<T>();
}

// Clamps to i32. The layout's i64 words keep the exact numbers, from which errors are reported.
std::int32_t clamped(std::int64_t rows) {
  return static_cast<std::int32_t>(
      std::min(rows, std::int64_t{std::numeric_limits<std::int32_t>::max()}));
}

// Returns the highest level such that a rank's groups, each cut off at it, fit into its capacity.
std::int64_t fitting_rows(Numbers wanted, std::int64_t alignment, std::int64_t capacity) {
  std::int64_t low = 0;
  std::int64_t high = capacity;
  while (low < high) {
    const std::int64_t level = (low + high + 1) / 2;
    std::int64_t rows = 0;
    for (const auto all : wanted) rows += round_up(std::min(all, level), alignment);
    if (rows <= capacity) {
      low = level;
    } else {
      high = level - 1;
    }
  }
  return low;
}

// Returns how many rows each of a rank's experts keeps when they do not all fit. Each keeps rows up
// to a common level; the room that is left goes to experts in turn, one alignment block each.
std::vector<std::int64_t> rows_that_fit(Numbers wanted, std::int64_t alignment,
                                        std::int64_t capacity) {
  const auto level = fitting_rows(wanted, alignment, capacity);
  std::vector<std::int64_t> kept;
  std::int64_t left = capacity;
  for (const auto all : wanted) {
    kept.push_back(std::min(all, level));
    left -= round_up(kept.back(), alignment);
  }
  for (std::size_t i = 0; i < wanted.size() && left >= alignment; ++i) {
    if (kept[i] == wanted[i]) continue;
    kept[i] = std::min(wanted[i], round_up(kept[i], alignment) + alignment);
    left -= alignment;
  }
  return kept;
}

std::span<const std::int32_t> experts_of(const LayOut& args, std::int64_t rank) {
  const auto offsets = args.rank_offsets.span<std::int32_t>();
  const auto first = static_cast<std::size_t>(offsets[static_cast<std::size_t>(rank)]);
  const auto last = static_cast<std::size_t>(offsets[static_cast<std::size_t>(rank) + 1]);
  return args.experts_by_rank.span<std::int32_t>().subspan(first, last - first);
}

// Returns the sum of the rows of ranks 0 … end − 1.
std::vector<std::int64_t> sum_over_ranks(const ConstTensorView& counts, std::int64_t end) {
  std::vector<std::int64_t> sums(index(counts.shape()[1]), 0);
  for (std::int64_t r = 0; r < end; ++r) {
    const auto of_rank = rank_row<std::int32_t>(counts, r);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of_rank[i];
  }
  return sums;
}

// Returns how many ranks' counts to use: all, or none if the ranks do not agree.
std::int64_t counted_ranks(const LayOut& args) {
  if (!args.must_agree) return args.counts.rows();
  const auto first = rank_row<std::int64_t>(*args.must_agree, 0);
  for (std::int64_t r = 1; r < args.must_agree->rows(); ++r) {
    if (!std::ranges::equal(rank_row<std::int64_t>(*args.must_agree, r), first)) return 0;
  }
  return args.counts.rows();
}

void count_tokens(const LayOut& args, std::int64_t counted) {
  const auto ranks = args.counts.rows();
  const auto needed =
      args.layout.span<std::int64_t>().subspan(index(needed_tokens_word(ranks, 0)), index(ranks));
  std::ranges::fill(needed, 0);
  if (!args.distinct_tokens) return;
  std::ranges::copy(sum_over_ranks(*args.distinct_tokens, counted), needed.begin());
  if (!args.token_offsets) return;
  const auto before =
      sum_over_ranks(*args.distinct_tokens, std::min<std::int64_t>(args.rank, counted));
  std::ranges::transform(before, args.token_offsets->span<std::int32_t>().begin(), clamped);
}

// Lays out the groups of one rank. count_tokens() must have run.
void lay_out_rank(const LayOut& args, Numbers total_rows, std::int64_t rank) {
  const auto words = args.layout.span<std::int64_t>();
  const auto ranks = args.counts.rows();
  const auto experts = experts_of(args, rank);
  const Sizing& sizing = args.sizing;
  std::vector<std::int64_t> wanted;
  std::int64_t needed = 0;
  std::int64_t asked = 0;
  for (const auto e : experts) {
    wanted.push_back(total_rows[static_cast<std::size_t>(e)]);
    needed += round_up(wanted.back(), args.alignment);
    asked += wanted.back();
  }
  const bool has_token_room =
      !sizing.is_bounded() ||
      words[index(needed_tokens_word(ranks, rank))] <= sizing.token_capacity();
  const bool overflow = sizing.is_bounded() && needed > sizing.capacity();
  const auto capacity = !has_token_room ? 0 : sizing.is_bounded() ? sizing.capacity() : needed;
  const auto kept = overflow && sizing.overflow() == Overflow::drop
                        ? rows_that_fit(wanted, args.alignment, capacity)
                        : std::move(wanted);
  std::int64_t offset = 0;
  std::int64_t total_kept = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto e = static_cast<std::size_t>(experts[i]);
    const auto rows = std::min(kept[i], capacity - offset);
    args.expert_offsets.span<std::int32_t>()[e] = clamped(offset);
    args.kept_rows.span<std::int32_t>()[e] = clamped(rows);
    offset = std::min(offset + round_up(rows, args.alignment), capacity);
    total_kept += rows;
  }
  if (overflow || !has_token_room) words[kOverflowWord] = 1;
  words[index(used_rows_word(ranks, rank))] = offset;
  words[index(needed_rows_word(ranks, rank))] = needed;
  words[index(dropped_word(ranks, rank))] = asked - total_kept;
}

void fill_own_groups(const LayOut& args) {
  const auto experts = experts_of(args, args.rank);
  const auto offsets = args.row_offsets.span<std::int32_t>();
  const auto rows = args.group_rows.span<std::int32_t>();
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto e = static_cast<std::size_t>(experts[i]);
    offsets[i] = args.expert_offsets.span<std::int32_t>()[e];
    rows[i] = args.kept_rows.span<std::int32_t>()[e];
  }
  const auto used = used_rows_word(args.counts.rows(), args.rank);
  offsets.back() = clamped(args.layout.span<std::int64_t>()[index(used)]);
}

void fill_starts(const LayOut& args, std::int64_t counted) {
  const auto kept_rows = args.kept_rows.span<std::int32_t>();
  const auto num_experts = kept_rows.size();
  const auto before = sum_over_ranks(args.counts, std::min<std::int64_t>(args.rank, counted));
  for (std::size_t e = 0; e < num_experts; ++e) {
    // Capped at kept_rows, beyond which no row gets a slot anyway.
    args.rows_before.span<std::int32_t>()[e] =
        clamped(std::min<std::int64_t>(before[e], kept_rows[e]));
  }
  const auto own = rank_row<std::int32_t>(args.counts, args.rank);
  const auto source_offsets = args.source_offsets.span<std::int32_t>();
  std::int64_t end = 0;
  source_offsets[0] = 0;
  for (std::size_t e = 0; e < num_experts; ++e) {
    end += counted > 0 ? own[e] : 0;
    source_offsets[e + 1] = clamped(end);
  }
}

void add_first_problem(const ConstTensorView& problems, std::span<std::int64_t> step) {
  if (step[kStepHasProblem] != 0) return;
  for (std::int64_t r = 0; r < problems.rows(); ++r) {
    const auto of_rank = rank_row<std::int64_t>(problems, r);
    if (of_rank[kNonFiniteToken] < 0 && of_rank[kBadToken] < 0) continue;
    step[kStepHasProblem] = 1;
    step[kStepProblemRank] = r;
    std::ranges::copy(of_rank, step.begin() + kStepProblem);
    return;
  }
}

void report(const LayOut& args) {
  const auto step = args.step->span<std::int64_t>();
  const auto ranks = args.counts.rows();
  const auto most = [&](std::int64_t first) {
    return std::ranges::max(args.layout.span<std::int64_t>().subspan(index(first), index(ranks)));
  };
  step[kStepMostNeeded] = std::max(step[kStepMostNeeded], most(needed_rows_word(ranks, 0)));
  step[kStepMostTokens] = std::max(step[kStepMostTokens], most(needed_tokens_word(ranks, 0)));
  if (args.problems) add_first_problem(*args.problems, step);
}

}  // namespace

void lay_out(const LayOut& args) {
  const auto counted = counted_ranks(args);
  const auto total_rows = sum_over_ranks(args.counts, counted);
  args.layout.span<std::int64_t>()[kOverflowWord] = 0;
  count_tokens(args, counted);
  for (std::int64_t r = 0; r < args.counts.rows(); ++r) lay_out_rank(args, total_rows, r);
  fill_own_groups(args);
  fill_starts(args, counted);
  if (args.step) report(args);
}

}  // namespace switchyard::cpu
