// SPDX-License-Identifier: Apache-2.0
// Drops the picks that an expert has no room for, by either rule.
#include <algorithm>
#include <cmath>
#include <vector>

#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

// Ids out of range are not picks. They stay as they are, and the plan reports them.
bool is_pick(const LimitPicks& args, std::int32_t id) {
  return 0 <= id && id < args.sums.num_experts;
}

std::int64_t most_picks(const LimitPicks& args) {
  std::int64_t tokens = 0;
  for (std::int64_t s = 0; s < args.sums.num_sequences(); ++s) {
    tokens += args.sums.by_sequence.slice(s, s + 1).span<std::int64_t>().back();
  }
  const auto picks = static_cast<double>(tokens * args.expert_ids.shape()[1]);
  const double share = picks / static_cast<double>(args.sums.num_experts) * args.capacity.factor;
  const auto most = static_cast<std::int64_t>(std::ceil(std::min(share, picks)));
  return std::max<std::int64_t>(1, most);
}

std::int64_t keep_first_come(const LimitPicks& args, std::int64_t most) {
  const auto top_k = static_cast<std::size_t>(args.expert_ids.shape()[1]);
  const auto kept = args.kept_ids.span<std::int32_t>();
  std::int64_t dropped = 0;
  std::vector<std::int64_t> taken(static_cast<std::size_t>(args.sums.num_experts));
  for (std::size_t k = 0; k < top_k; ++k) {
    std::ranges::fill(taken, 0);
    for (std::size_t i = k; i < kept.size(); i += top_k) {
      if (!is_pick(args, kept[i])) continue;
      if (taken[static_cast<std::size_t>(kept[i])]++ < most) continue;
      kept[i] = -1;
      ++dropped;
    }
  }
  return dropped;
}

std::int64_t keep_highest_weight(const LimitPicks& args, std::int64_t most) {
  const auto kept = args.kept_ids.span<std::int32_t>();
  const auto weights = args.weights.span<float>();
  std::vector<std::vector<std::size_t>> picks(static_cast<std::size_t>(args.sums.num_experts));
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (is_pick(args, kept[i])) picks[static_cast<std::size_t>(kept[i])].push_back(i);
  }
  std::int64_t dropped = 0;
  const auto is_better = [&](std::size_t a, std::size_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  };
  for (auto& of_expert : picks) {
    if (static_cast<std::int64_t>(of_expert.size()) <= most) continue;
    const auto first_dropped = of_expert.begin() + most;
    std::nth_element(of_expert.begin(), first_dropped, of_expert.end(), is_better);
    for (auto i = first_dropped; i != of_expert.end(); ++i) kept[*i] = -1;
    dropped += of_expert.end() - first_dropped;
  }
  return dropped;
}

}  // namespace

void limit_picks(const LimitPicks& args) {
  std::ranges::copy(args.expert_ids.span<std::int32_t>(),
                    args.kept_ids.span<std::int32_t>().begin());
  const auto most = most_picks(args);
  args.dropped.span<std::int64_t>()[0] = args.capacity.rule == CapacityRule::first_come
                                             ? keep_first_come(args, most)
                                             : keep_highest_weight(args, most);
}

}  // namespace switchyard::cpu
