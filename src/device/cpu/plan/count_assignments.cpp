// Counting and slotting assignments: two passes over the ids, O(T·K + E + ranks).
#include <vector>

#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

// Asks for memory that is soon to be written here and there: after the rows of the last step, none
// of it is in a cache any more, and all of it at once is faster than one miss after the other.
void fetch_ahead(const TensorView& table) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t i = 0; i < table.bytes(); i += kLine) __builtin_prefetch(table.data() + i, 1);
}

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

std::vector<SlotBase> slot_bases(const AssignSlots& args) {
  const auto owners = args.owners.span<std::int32_t>();
  const auto offsets = args.expert_offsets.span<std::int32_t>();
  const auto rows_before = args.rows_before.span<std::int32_t>();
  const auto kept_rows = args.kept_rows.span<std::int32_t>();
  const auto source_offsets = args.source_offsets.span<std::int32_t>();
  std::vector<SlotBase> bases(owners.size());
  for (std::size_t e = 0; e < bases.size(); ++e) {
    bases[e] = {offsets[e] + rows_before[e], offsets[e] + kept_rows[e], source_offsets[e],
                owners[e]};
  }
  return bases;
}

void note_bad_id(std::span<std::int64_t> problems, std::int64_t token, std::int64_t k,
                 std::int32_t id, bool repeats) {
  problems[kBadToken] = token;
  problems[kBadK] = k;
  problems[kBadId] = id;
  problems[kBadIsDuplicate] = repeats ? 1 : 0;
}

}  // namespace

void count_assignments(const CountAssignments& args) {
  const auto num_tokens = args.expert_ids.rows();
  const auto top_k = args.expert_ids.shape()[1];
  const auto owners = args.owners.span<std::int32_t>();
  const auto num_experts = static_cast<std::uint32_t>(owners.size());
  std::vector<CountedExpert> experts(owners.size());
  for (std::size_t e = 0; e < experts.size(); ++e) experts[e].owner = owners[e];
  const auto distinct_tokens = args.distinct_tokens.span<std::int32_t>();
  std::vector<CountedRank> ranks(distinct_tokens.size());
  fetch_ahead(args.positions);

  const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.data());
  const auto problems = args.problems.span<std::int64_t>();
  std::int32_t* position = args.positions.span<std::int32_t>().data();
  for (std::int64_t t = 0; t < num_tokens; ++t, ids += args.expert_ids.row_stride()) {
    for (std::int64_t k = 0; k < top_k; ++k, ++position) {
      const auto e = static_cast<std::uint32_t>(ids[k]);
      const bool in_range = e < num_experts;
      const bool repeats = in_range && !args.allow_duplicates && experts[e].last_token == t;
      if (!in_range || repeats) [[unlikely]] {
        *position = -1;
        if (ids[k] != -1 && problems[kBadToken] < 0) note_bad_id(problems, t, k, ids[k], repeats);
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
  const auto counts = args.counts.span<std::int32_t>();
  for (std::size_t e = 0; e < experts.size(); ++e) counts[e] = experts[e].count;
  for (std::size_t r = 0; r < ranks.size(); ++r) distinct_tokens[r] = ranks[r].num_tokens;
}

void assign_slots(const AssignSlots& args) {
  const auto num_tokens = args.expert_ids.rows();
  const auto top_k = args.expert_ids.shape()[1];
  fetch_ahead(args.target_ranks);
  fetch_ahead(args.sources);
  if (args.row_sources) fetch_ahead(*args.row_sources);
  const auto bases = slot_bases(args);
  const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.data());
  std::int32_t* const slots = args.slots.span<std::int32_t>().data();
  std::int32_t* const targets = args.target_ranks.span<std::int32_t>().data();
  std::int32_t* const sources = args.sources.span<std::int32_t>().data();
  std::int32_t* const row_sources =
      args.row_sources ? args.row_sources->span<std::int32_t>().data() : nullptr;
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
      const bool has_room = slot < base.end_slot;
      slots[assignment] = has_room ? static_cast<std::int32_t>(slot) : -1;
      if (has_room && row_sources != nullptr) row_sources[slot] = assignment;
      targets[assignment] = base.owner;
      sources[base.first_source + position] = assignment;
    }
  }
}

}  // namespace switchyard::cpu
