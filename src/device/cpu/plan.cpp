// Counting and slotting assignments: two passes over the ids, O(T·K + E + ranks).
#include "device/cpu/plan.h"

#include <vector>

namespace switchyard::cpu {
namespace {

// What is known of an expert, and of a rank, while assignments are counted: together, since every
// assignment touches all of it. The last token finds repeats without a search.
struct CountedExpert {
  std::int64_t last_token = -1;
  std::int32_t count = 0;
  std::int32_t owner = 0;
};
struct CountedRank {
  std::int64_t last_token = -1;
  std::int32_t num_tokens = 0;
};

// What the slots of an expert's assignments are computed from.
struct SlotBase {
  std::int32_t first_slot = 0;  // of this rank's first assignment
  std::int32_t end_slot = 0;    // from here on there is no room
  std::int32_t first_source = 0;
  std::int32_t owner = 0;
};

}  // namespace

BadId count_assignments(const CountAssignments& args) {
  const auto num_tokens = args.expert_ids.rows();
  const auto top_k = args.expert_ids.shape()[1];
  const auto num_experts = static_cast<std::uint32_t>(args.owners.size());
  std::vector<CountedExpert> experts(args.owners.size());
  for (std::size_t e = 0; e < experts.size(); ++e) experts[e].owner = args.owners[e];
  std::vector<CountedRank> ranks(args.distinct_tokens.size());

  const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.data());
  BadId first;
  std::int32_t* position = args.positions.data();
  for (std::int64_t t = 0; t < num_tokens; ++t, ids += args.expert_ids.row_stride()) {
    for (std::int64_t k = 0; k < top_k; ++k, ++position) {
      const auto e = static_cast<std::uint32_t>(ids[k]);
      const bool in_range = e < num_experts;
      const bool repeats = in_range && !args.allow_duplicates && experts[e].last_token == t;
      if (!in_range || repeats) [[unlikely]] {
        *position = -1;
        if (ids[k] != -1 && first.token < 0) first = {t, k, ids[k], repeats};
        continue;
      }
      CountedExpert& expert = experts[e];
      CountedRank& rank = ranks[static_cast<std::size_t>(expert.owner)];
      *position = expert.count++;
      expert.last_token = t;
      rank.num_tokens += rank.last_token != t ? 1 : 0;
      rank.last_token = t;
    }
  }
  for (std::size_t e = 0; e < experts.size(); ++e) args.counts[e] = experts[e].count;
  for (std::size_t r = 0; r < ranks.size(); ++r) args.distinct_tokens[r] = ranks[r].num_tokens;
  return first;
}

void assign_slots(const AssignSlots& args) {
  const auto num_tokens = args.expert_ids.rows();
  const auto top_k = args.expert_ids.shape()[1];
  std::vector<SlotBase> bases(args.row_offsets.size());
  for (std::size_t e = 0; e < bases.size(); ++e) {
    bases[e] = {args.row_offsets[e] + args.rows_before[e], args.row_offsets[e] + args.kept_rows[e],
                args.source_offsets[e], args.owners[e]};
  }
  const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.data());
  std::int32_t* const slots = args.slots.data();
  std::int32_t* const targets = args.target_ranks.data();
  std::int32_t* const sources = args.sources.data();
  std::int32_t assignment = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t, ids += args.expert_ids.row_stride()) {
    for (std::int64_t k = 0; k < top_k; ++k, ++assignment) {
      const std::int32_t position = slots[assignment];
      if (position < 0) [[unlikely]] {
        targets[assignment] = -1;
        continue;
      }
      const SlotBase& base = bases[static_cast<std::size_t>(ids[k])];
      const std::int64_t slot = std::int64_t{base.first_slot} + position;
      slots[assignment] = slot < base.end_slot ? static_cast<std::int32_t>(slot) : -1;
      targets[assignment] = base.owner;
      sources[base.first_source + position] = assignment;
    }
  }
}

}  // namespace switchyard::cpu
