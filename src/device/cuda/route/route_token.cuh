// SPDX-License-Identifier: Apache-2.0
// Per-token operations of a warp on logits and scores: lane l has experts l, l + 32, …
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "device/cuda/whole_sums.cuh"
#include "switchyard/router.h"

namespace switchyard::cuda {

constexpr int kWarpsPerBlock = 4;
constexpr float kDivisorEpsilon = 1e-20F;

// One value per expert: in registers, or, if kPerLane is 0, in memory for any number of experts.
template <typename T, int kPerLane>
struct LaneValues {
  T values[kPerLane] = {};

  __device__ explicit LaneValues(T* /*row*/) {}
  __device__ T& operator[](int i) { return values[i]; }
  // Returns the value of an expert, which may be another in each lane, or 0 for −1. All lanes must
  // call it.
  __device__ T of(int expert) const {
    T value = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const T other = __shfl_sync(kAllLanes, values[i], expert & 31);
      value = expert >> 5 == i ? other : value;
    }
    return value;
  }
};
template <typename T>
struct LaneValues<T, 0> {
  T* row;

  __device__ explicit LaneValues(T* row) : row(row) {}
  __device__ T& operator[](int i) { return row[32 * i + lane_of_thread()]; }
  __device__ T of(int expert) const {
    __syncwarp();
    return expert < 0 ? T{} : row[expert];
  }
};

// Calls visit(i, expert) for the experts of this lane.
template <int kPerLane, typename Visit>
__device__ inline void each_expert(int num_experts, Visit visit) {
  const int lane = lane_of_thread();
  if constexpr (kPerLane > 0) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < num_experts) visit(i, lane + 32 * i);
    }
  } else {
    for (int i = 0; lane + 32 * i < num_experts; ++i) visit(i, lane + 32 * i);
  }
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// The router's options, in the form that kernels use.
struct TokenRules {
  int num_experts;
  int top_k;
  bool is_softmax;
  bool normalises;
  float scale;
  int num_expert_groups;
  int kept_expert_groups;
  const float* choice_bias;  // [E] or null
  const float* logits_bias;  // [E] or null

  TokenRules(const RouterOptions& options, const RouterWeights& weights)
      : num_experts(options.num_experts),
        top_k(static_cast<int>(options.top_k)),
        is_softmax(options.score == ScoreFunction::softmax),
        normalises(options.normalise == Normalise::chosen),
        scale(options.scale),
        num_expert_groups(options.num_expert_groups),
        kept_expert_groups(options.kept_expert_groups),
        choice_bias(nullptr),
        logits_bias(nullptr) {
    const auto* bias = reinterpret_cast<const float*>(weights.score_bias.data());
    if (options.score_bias == ScoreBias::choice) choice_bias = bias;
    if (options.score_bias == ScoreBias::logits) logits_bias = bias;
  }
};

// Returns log Σ exp(logits [E]), without the score bias.
template <int kPerLane>
__device__ inline float log_sum_exp(const TokenRules& rules, const float* logits) {
  float most = -FLT_MAX;
  each_expert<kPerLane>(rules.num_experts, [&](int, int e) { most = fmaxf(most, logits[e]); });
  most = warp_max(most);
  float sum = 0.0F;
  each_expert<kPerLane>(rules.num_experts, [&](int, int e) { sum += expf(logits[e] - most); });
  return most + logf(warp_sum(sum));
}

// Computes scores from logits [E]. Returns false if those are not all finite.
template <int kPerLane>
__device__ inline bool score(const TokenRules& rules, const float* logits,
                             LaneValues<float, kPerLane>& scores) {
  bool is_finite = true;
  float most = -FLT_MAX;
  each_expert<kPerLane>(rules.num_experts, [&](int i, int e) {
    const float value = rules.logits_bias == nullptr ? logits[e] : logits[e] + rules.logits_bias[e];
    is_finite = is_finite && isfinite(value);
    most = fmaxf(most, value);
    scores[i] = value;
  });
  if (!__all_sync(kAllLanes, is_finite)) return false;
  if (!rules.is_softmax) {
    each_expert<kPerLane>(rules.num_experts,
                          [&](int i, int) { scores[i] = 1.0F / (1.0F + expf(-scores[i])); });
    return true;
  }
  most = warp_max(most);
  float sum = 0.0F;
  each_expert<kPerLane>(rules.num_experts, [&](int i, int) {
    scores[i] = expf(scores[i] - most);
    sum += scores[i];
  });
  sum = warp_sum(sum);
  each_expert<kPerLane>(rules.num_experts, [&](int i, int) { scores[i] /= sum; });
  return true;
}

// Calls launch(std::integral_constant<int, kPerLane>) with the fewest registers that hold all
// experts, or with 0 if there are too many.
template <typename Launch>
void with_experts_per_lane(int num_experts, Launch launch) {
  if (num_experts <= 32) return launch(std::integral_constant<int, 1>{});
  if (num_experts <= 64) return launch(std::integral_constant<int, 2>{});
  if (num_experts <= 128) return launch(std::integral_constant<int, 4>{});
  if (num_experts <= 256) return launch(std::integral_constant<int, 8>{});
  if (num_experts <= 512) return launch(std::integral_constant<int, 16>{});
  if (num_experts <= 1024) return launch(std::integral_constant<int, 32>{});
  return launch(std::integral_constant<int, 0>{});
}

}  // namespace switchyard::cuda
