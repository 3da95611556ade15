// SPDX-License-Identifier: Apache-2.0
// A plain plan, one assignment and one expert after another, to compare devices with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "device/plan_words.h"
#include "support/device/device_tables.h"
#include "switchyard/plan.h"

namespace switchyard::testing {

inline std::int64_t round_up(std::int64_t rows, std::int64_t to) {
  return (rows + to - 1) / to * to;
}

inline Counted count_plainly(const Tensor& ids, const Ints& owners, int num_ranks,
                             bool allow_duplicates, Words problems) {
  const auto num_experts = static_cast<std::int64_t>(owners.size());
  Counted all{Ints(owners.size()), Ints(index(num_ranks)), {}, {}, std::move(problems)};
  const auto top_k = ids.shape()[1];
  for (std::int64_t t = 0; t < ids.rows(); ++t) {
    std::set<std::int32_t> experts;
    std::set<std::int32_t> ranks;
    for (std::int64_t k = 0; k < top_k; ++k) {
      const auto id = ids.span<std::int32_t>()[index(t * top_k + k)];
      const bool in_range = 0 <= id && id < num_experts;
      const bool repeats = in_range && !experts.insert(id).second;
      if (in_range && (allow_duplicates || !repeats)) {
        all.positions.push_back(all.counts[index(id)]++);
        auto& tokens = all.distinct_tokens[index(owners[index(id)])];
        if (ranks.insert(owners[index(id)]).second) ++tokens;
        all.token_positions.push_back(tokens - 1);
        continue;
      }
      all.positions.push_back(-1);
      all.token_positions.push_back(-1);
      if (id == -1 || all.problems[kBadToken] >= 0) continue;
      all.problems = {all.problems[kNonFiniteToken], t, k, id, repeats ? 1 : 0};
    }
  }
  return all;
}

struct Laid {
  Ints expert_offsets;
  Ints rows_before;
  Ints kept_rows;
  Ints row_offsets = {};
  Ints group_rows = {};
  Ints source_offsets;
  Words layout;
  Ints token_offsets = {};
};

struct LayoutInput {
  Ints counts;  // [ranks, E]
  Ints owners;
  int num_ranks = 1;
  int rank = 0;
  std::int64_t alignment = 1;
  Sizing sizing = {};
  Ints distinct_tokens = {};       // [ranks, ranks], if given
  Words must_agree = {};           // [ranks, n], if given
  std::int64_t columns_apart = 0;  // extra columns after every row of these three

  // Returns the distinct tokens that ranks 0 … end − 1 send to rank r.
  std::int64_t tokens_for(int r, int end) const {
    std::int64_t sum = 0;
    for (int s = 0; s < end && !distinct_tokens.empty(); ++s) {
      sum += distinct_tokens[index(s * num_ranks + r)];
    }
    return sum;
  }
  bool ranks_agree() const {
    const auto n = must_agree.size() / index(num_ranks);
    for (std::size_t i = 0; i < must_agree.size(); ++i) {
      if (must_agree[i] != must_agree[i % n]) return false;
    }
    return true;
  }
  std::int64_t count(std::int64_t r, std::int64_t e) const {
    return counts[index(r * std::ssize(owners) + e)];
  }
  std::int64_t total(std::int64_t e) const {
    std::int64_t sum = 0;
    for (int r = 0; r < num_ranks; ++r) sum += count(r, e);
    return sum;
  }
  Ints experts_of(int r) const {
    Ints experts;
    for (std::int32_t e = 0; e < std::ssize(owners); ++e) {
      if (owners[index(e)] == r) experts.push_back(e);
    }
    return experts;
  }
  std::int64_t rows_at(const Ints& experts, std::int64_t level) const {
    std::int64_t rows = 0;
    for (const auto e : experts) rows += round_up(std::min(total(e), level), alignment);
    return rows;
  }
};

// Raises the level as long as the rows fit, then gives one more block of the alignment to the first
// experts that are cut.
inline Words fit(const LayoutInput& in, const Ints& experts) {
  const auto capacity = in.sizing.capacity();
  std::int64_t level = 0;
  while (level < capacity && in.rows_at(experts, level + 1) <= capacity) ++level;
  std::int64_t left = capacity - in.rows_at(experts, level);
  Words kept;
  for (const auto e : experts) {
    kept.push_back(std::min(in.total(e), level));
    if (kept.back() == in.total(e) || left < in.alignment) continue;
    kept.back() = std::min(in.total(e), round_up(level, in.alignment) + in.alignment);
    left -= in.alignment;
  }
  return kept;
}

inline void lay_out_rank_plainly(const LayoutInput& in, int r, Laid& laid) {
  const Ints experts = in.experts_of(r);
  std::int64_t needed = 0;
  std::int64_t dropped = 0;
  Words kept;
  for (const auto e : experts) {
    kept.push_back(in.total(e));
    needed += round_up(in.total(e), in.alignment);
    dropped += in.total(e);
  }
  const auto tokens = in.tokens_for(r, in.num_ranks);
  const bool tokens_overflow = in.sizing.is_bounded() && tokens > in.sizing.token_capacity();
  const bool overflows = in.sizing.is_bounded() && needed > in.sizing.capacity();
  const auto capacity = tokens_overflow          ? 0
                        : in.sizing.is_bounded() ? in.sizing.capacity()
                                                 : needed;
  if (overflows && in.sizing.overflow() == Overflow::drop) kept = fit(in, experts);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto e = index(experts[i]);
    const auto rows = std::min(kept[i], capacity - end);
    laid.expert_offsets[e] = static_cast<std::int32_t>(end);
    laid.kept_rows[e] = static_cast<std::int32_t>(rows);
    if (r == in.rank) laid.row_offsets.push_back(static_cast<std::int32_t>(end));
    if (r == in.rank) laid.group_rows.push_back(static_cast<std::int32_t>(rows));
    end = std::min(end + round_up(rows, in.alignment), capacity);
    dropped -= rows;
  }
  if (r == in.rank) laid.row_offsets.push_back(static_cast<std::int32_t>(end));
  if (overflows || tokens_overflow) laid.layout[index(kOverflowWord)] = 1;
  laid.layout[index(used_rows_word(in.num_ranks, r))] = end;
  laid.layout[index(needed_rows_word(in.num_ranks, r))] = needed;
  laid.layout[index(dropped_word(in.num_ranks, r))] = dropped;
  laid.layout[index(needed_tokens_word(in.num_ranks, r))] = tokens;
  if (in.distinct_tokens.empty()) return;
  laid.token_offsets.push_back(static_cast<std::int32_t>(in.tokens_for(r, in.rank)));
}

inline Laid lay_out_plainly(LayoutInput in) {
  if (!in.ranks_agree()) {
    std::ranges::fill(in.counts, 0);
    std::ranges::fill(in.distinct_tokens, 0);
  }
  Laid laid{.expert_offsets = Ints(in.owners.size()),
            .rows_before = Ints(in.owners.size()),
            .kept_rows = Ints(in.owners.size()),
            .source_offsets = {0},
            .layout = Words(index(layout_words(in.num_ranks)))};
  for (int r = 0; r < in.num_ranks; ++r) lay_out_rank_plainly(in, r, laid);
  for (std::size_t e = 0; e < in.owners.size(); ++e) {
    const auto at = static_cast<std::int64_t>(e);
    for (int r = 0; r < in.rank; ++r) {
      laid.rows_before[e] += static_cast<std::int32_t>(in.count(r, at));
    }
    laid.rows_before[e] = std::min(laid.rows_before[e], laid.kept_rows[e]);
    laid.source_offsets.push_back(laid.source_offsets.back() +
                                  static_cast<std::int32_t>(in.count(in.rank, at)));
  }
  return laid;
}

}  // namespace switchyard::testing
