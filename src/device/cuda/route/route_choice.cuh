// SPDX-License-Identifier: Apache-2.0
// Chooses a token's best experts by score. Ties go to the lower id.
#pragma once

#include <climits>

#include "device/cuda/route/route_token.cuh"

namespace switchyard::cuda {

// Keys order like the floats they stand for and are at least 2. Key 0 marks an expert that is
// taken, key 1 one in a dropped expert group.
constexpr unsigned kTakenKey = 0;
constexpr unsigned kDroppedKey = 1;

__device__ inline unsigned key_of(float value) {
  const unsigned bits = __float_as_uint(value + 0.0F);  // turns −0 into 0
  return max(2U, (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U);
}
__device__ inline float value_of(unsigned key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key & 0x7fffffffU : ~key);
}

struct Best {
  unsigned key = kTakenKey;
  unsigned id = UINT_MAX;

  // Must be called in ascending order of ids.
  __device__ void see(unsigned other, int other_id) {
    if (other <= key) return;
    key = other;
    id = static_cast<unsigned>(other_id);
  }
  // Returns the id of the best over all lanes.
  __device__ int agree() const {
    const unsigned top = __reduce_max_sync(kAllLanes, key);
    return static_cast<int>(__reduce_min_sync(kAllLanes, key == top ? id : UINT_MAX));
  }
};

// Scratch memory of one token, for choosing expert groups.
struct ExpertGroupMemory {
  unsigned* keys;           // [E]
  unsigned* expert_groups;  // [num_expert_groups]
};

// Sets expert_groups[g] to the key of the sum of the group's two best scores.
__device__ inline void weigh_expert_groups(const TokenRules& rules,
                                           const ExpertGroupMemory& memory) {
  const int size = rules.num_experts / rules.num_expert_groups;
  const int lane = lane_of_thread();
  for (int g = lane; g < rules.num_expert_groups; g += 32) {
    unsigned best = 0;
    unsigned second = 0;
    int i = lane % size;  // lanes start at different experts to avoid bank conflicts
    for (int n = 0; n < size; ++n) {
      const unsigned key = memory.keys[g * size + i];
      second = max(second, min(best, key));
      best = max(best, key);
      i = i + 1 == size ? 0 : i + 1;
    }
    memory.expert_groups[g] = size > 1 ? key_of(value_of(best) + value_of(second)) : best;
  }
}

// Sets the keys of experts outside the kept expert groups to kDroppedKey.
template <int kPerLane>
__device__ inline void drop_expert_groups(const TokenRules& rules,
                                          LaneValues<unsigned, kPerLane>& keys,
                                          const ExpertGroupMemory& memory) {
  const int lane = lane_of_thread();
  const int size = rules.num_experts / rules.num_expert_groups;
  if constexpr (kPerLane > 0) {  // otherwise the keys are in memory already
    each_expert<kPerLane>(rules.num_experts, [&](int i, int e) { memory.keys[e] = keys[i]; });
  }
  __syncwarp();
  weigh_expert_groups(rules, memory);
  for (int kept = 0; kept < rules.kept_expert_groups; ++kept) {
    Best best;
    for (int g = lane; g < rules.num_expert_groups; g += 32) best.see(memory.expert_groups[g], g);
    const int taken = best.agree();
    if (taken % 32 == lane) memory.expert_groups[taken] = kTakenKey;
  }
  __syncwarp();
  each_expert<kPerLane>(rules.num_experts, [&](int i, int e) {
    if (memory.expert_groups[e / size] != kTakenKey) keys[i] = kDroppedKey;
  });
}

template <int kPerLane>
__device__ inline void compare_by(const TokenRules& rules, LaneValues<float, kPerLane>& scores,
                                  LaneValues<unsigned, kPerLane>& keys,
                                  const ExpertGroupMemory& memory) {
  each_expert<kPerLane>(rules.num_experts, [&](int i, int e) {
    keys[i] = key_of(rules.choice_bias == nullptr ? scores[i] : scores[i] + rules.choice_bias[e]);
  });
  if (rules.kept_expert_groups < rules.num_expert_groups)
    drop_expert_groups<kPerLane>(rules, keys, memory);
}

// Returns the best expert that is left, and marks it as taken.
template <int kPerLane>
__device__ inline int take_best(const TokenRules& rules, LaneValues<unsigned, kPerLane>& keys) {
  Best best;
  each_expert<kPerLane>(rules.num_experts, [&](int i, int e) { best.see(keys[i], e); });
  const int taken = best.agree();
  each_expert<kPerLane>(rules.num_experts, [&](int i, int e) {
    if (e == taken) keys[i] = kTakenKey;
  });
  return taken;
}

}  // namespace switchyard::cuda
