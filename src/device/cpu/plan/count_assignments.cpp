// SPDX-License-Identifier: Apache-2.0
// Counts assignments in one pass over the ids, O(T·K + E + ranks).
#include <vector>

#include "device/cpu/kernels.h"
#include "device/cpu/plan/fetch_ahead.h"

namespace switchyard::cpu {
namespace {

// Running counts of an expert and of a rank. The fields are kept together because every assignment
// touches all of them. `last_token` detects repeats without a search.
struct CountedExpert {
  std::int64_t last_token = -1;
  std::int32_t count = 0;
  std::int32_t owner = 0;
};
struct CountedRank {
  std::int64_t last_token = -1;
  std::int32_t num_tokens = 0;
};

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
  if (args.token_positions) fetch_ahead(*args.token_positions);

  const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.data());
  const auto problems = args.problems.span<std::int64_t>();
  std::int32_t* position = args.positions.span<std::int32_t>().data();
  std::int32_t* token_position =
      args.token_positions ? args.token_positions->span<std::int32_t>().data() : nullptr;
  for (std::int64_t t = 0; t < num_tokens; ++t, ids += args.expert_ids.row_stride()) {
    for (std::int64_t k = 0; k < top_k; ++k, ++position) {
      const auto e = static_cast<std::uint32_t>(ids[k]);
      const bool in_range = e < num_experts;
      const bool repeats = in_range && !args.allow_duplicates && experts[e].last_token == t;
      if (!in_range || repeats) [[unlikely]] {
        *position = -1;
        if (token_position != nullptr) *token_position++ = -1;
        if (ids[k] != -1 && problems[kBadToken] < 0) note_bad_id(problems, t, k, ids[k], repeats);
        continue;
      }
      CountedExpert& expert = experts[e];
      CountedRank& rank = ranks[static_cast<std::size_t>(expert.owner)];
      *position = expert.count++;
      expert.last_token = t;
      rank.num_tokens += rank.last_token != t ? 1 : 0;
      rank.last_token = t;
      if (token_position != nullptr) *token_position++ = rank.num_tokens - 1;
    }
  }
  const auto counts = args.counts.span<std::int32_t>();
  for (std::size_t e = 0; e < experts.size(); ++e) counts[e] = experts[e].count;
  for (std::size_t r = 0; r < ranks.size(); ++r) distinct_tokens[r] = ranks[r].num_tokens;
}

}  // namespace switchyard::cpu
