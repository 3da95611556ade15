// Counting assignments plainly, one after the other, to compare devices with.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

#include "device/plan_words.h"
#include "support/device/device_tables.h"

namespace switchyard::testing {

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

}  // namespace switchyard::testing
