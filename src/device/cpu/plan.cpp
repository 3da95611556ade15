// Counting and slotting assignments: two passes over the ids, O(T·K + E + ranks).
#include "device/cpu/plan.h"

#include <algorithm>
#include <vector>

namespace switchyard::cpu {

BadId count_assignments(const CountAssignments& args) {
  const auto num_tokens = args.expert_ids.rows();
  const auto top_k = args.expert_ids.shape()[1];
  const auto num_experts = static_cast<std::int32_t>(args.owners.size());
  std::ranges::fill(args.counts, 0);
  std::ranges::fill(args.distinct_tokens, 0);
  // The last token that went to an expert, and to a rank: finds repeats without searching.
  std::vector<std::int64_t> expert_token(args.owners.size(), -1);
  std::vector<std::int64_t> rank_token(args.distinct_tokens.size(), -1);

  BadId first;
  std::int32_t* targets = args.target_ranks.data();
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.row(t));
    for (std::int64_t k = 0; k < top_k; ++k, ++targets) {
      const std::int32_t id = ids[k];
      *targets = -1;
      if (id == -1) continue;
      const auto e = static_cast<std::size_t>(id);
      const bool in_range = 0 <= id && id < num_experts;
      if (!in_range || (expert_token[e] == t && !args.allow_duplicates)) {
        if (first.token < 0) first = {t, k, id, in_range};
        continue;
      }
      const std::int32_t owner = args.owners[e];
      const auto r = static_cast<std::size_t>(owner);
      *targets = owner;
      expert_token[e] = t;
      ++args.counts[e];
      args.distinct_tokens[r] += rank_token[r] != t ? 1 : 0;
      rank_token[r] = t;
    }
  }
  return first;
}

void assign_slots(const AssignSlots& args) {
  const auto num_tokens = args.expert_ids.rows();
  const auto top_k = args.expert_ids.shape()[1];
  const std::size_t num_experts = args.row_offsets.size();
  std::vector<std::int32_t> next(num_experts, 0);  // own assignments to each expert so far

  std::int64_t assignment = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.row(t));
    for (std::int64_t k = 0; k < top_k; ++k, ++assignment) {
      auto& slot = args.slots[static_cast<std::size_t>(assignment)];
      slot = -1;
      if (args.target_ranks[static_cast<std::size_t>(assignment)] < 0) continue;
      const auto e = static_cast<std::size_t>(ids[k]);
      const std::int32_t own = next[e]++;
      const std::int32_t position = args.rows_before[e] + own;
      if (position < args.kept_rows[e]) slot = args.row_offsets[e] + position;
      args.sources[static_cast<std::size_t>(args.source_offsets[e] + own)] =
          static_cast<std::int32_t>(assignment);
    }
  }
}

}  // namespace switchyard::cpu
