// SPDX-License-Identifier: Apache-2.0
// The router's backward on a GPU: recomputes the logits, computes their gradient with one warp per
// token, then the gradients of the tokens and the gate.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "core/given.h"
#include "device/cuda/early_launch.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_token.cuh"

namespace switchyard::cuda {
namespace {

struct BackwardArgs {
  TokenRules rules;
  std::int64_t num_tokens = 0;
  float* logits = nullptr;  // [T, E]; overwritten with their gradient if wants_values
  std::int64_t logits_stride = 0;
  bool wants_values = false;
  __nv_bfloat16* main = nullptr;  // out [T, E], see DLogits; or null
  __nv_bfloat16* rest = nullptr;
  std::int64_t terms_stride = 0;
  std::int32_t* has_part = nullptr;     // out [T]
  const std::int32_t* valid = nullptr;  // [T] or null
  std::int64_t valid_stride = 0;
  const std::int32_t* ids = nullptr;
  std::int64_t ids_stride = 0;
  const float* d_weights = nullptr;
  std::int64_t d_weights_stride = 0;
  const float* by_score = nullptr;  // [S, E] or null
  std::int64_t by_score_stride = 0;
  std::int64_t sequence_tokens = 0;
  bool by_shares = false;
  const float* by_square = nullptr;  // [1] or null
  // Only for more experts than registers hold: [T, E] each.
  float* all_scores = nullptr;
  float* all_slopes = nullptr;
};

// The gradient of one token's logits.
struct DLogitsRow {
  float* logits;  // [E]
  bool wants_values;
  __nv_bfloat16* main;
  __nv_bfloat16* rest;

  __device__ DLogitsRow(const BackwardArgs& p, std::int64_t token)
      : logits(p.logits + token * p.logits_stride),
        wants_values(p.wants_values),
        main(p.main == nullptr ? nullptr : p.main + token * p.terms_stride),
        rest(p.rest + token * p.terms_stride) {}

  __device__ void set(int expert, float d_logit) const {
    if (wants_values) logits[expert] = d_logit;
    if (main == nullptr) return;
    const __nv_bfloat16 rounded = __float2bfloat16_rn(d_logit);
    main[expert] = rounded;
    rest[expert] = __float2bfloat16_rn(d_logit - __bfloat162float(rounded));
  }
};

// The picks of one token. Ids that no expert has count as no pick.
struct TokenPicks {
  const std::int32_t* ids;
  const float* d_weights;
  int top_k;
  int num_experts;
  int lane;

  __device__ TokenPicks(const BackwardArgs& p, std::int64_t token)
      : ids(p.ids + token * p.ids_stride),
        d_weights(p.d_weights + token * p.d_weights_stride),
        top_k(p.rules.top_k),
        num_experts(p.rules.num_experts),
        lane(lane_of_thread()) {}

  __device__ bool is_pick(std::int32_t id) const { return 0 <= id && id < num_experts; }
  __device__ bool has_any() const {
    bool any = false;
    for (int k = lane; k < top_k; k += 32) any = any || is_pick(ids[k]);
    return __any_sync(kAllLanes, any);
  }
  // Calls visit(id, d_weight) for every pick, each in a lane of its own. Other lanes see id −1.
  template <typename Visit>
  __device__ void each_in_a_lane(Visit visit) const {
    for (int k = lane; k - lane < top_k; k += 32) {
      const std::int32_t id = k < top_k ? ids[k] : -1;
      const bool is_there = is_pick(id);
      visit(is_there ? id : -1, is_there ? d_weights[k] : 0.0F);
    }
  }
};

// Sets slopes [E] to the gradient that reaches the scores through the weights.
template <int kPerLane>
__device__ void weight_slopes(const TokenRules& rules, const TokenPicks& picks,
                              LaneValues<float, kPerLane>& scores,
                              LaneValues<float, kPerLane>& slopes) {
  float total = 0.0F;
  float weighted = 0.0F;
  picks.each_in_a_lane([&](int id, float d_weight) {
    const float picked = scores.of(id);
    total += picked;
    weighted += d_weight * picked;
  });
  total = warp_sum(total);
  weighted = warp_sum(weighted);
  const float divisor = rules.normalises ? total + kDivisorEpsilon : 1.0F;
  const float shift = rules.normalises ? weighted / divisor : 0.0F;
  each_expert<kPerLane>(rules.num_experts, [&](int i, int) { slopes[i] = 0.0F; });
  picks.each_in_a_lane([&](int my_id, float d_weight) {
    const float my_slope = rules.scale * (d_weight - shift) / divisor;
    for (unsigned left = __ballot_sync(kAllLanes, my_id >= 0); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int id = __shfl_sync(kAllLanes, my_id, lane);
      const float slope = __shfl_sync(kAllLanes, my_slope, lane);
      each_expert<kPerLane>(rules.num_experts, [&](int i, int e) {
        if (e == id) slopes[i] += slope;
      });
    }
  });
}

// Adds the gradient of a loss of the scores, or of their shares, to slopes [E].
template <int kPerLane>
__device__ void add_loss_slopes(const TokenRules& rules, const float* by_score, bool by_shares,
                                LaneValues<float, kPerLane>& scores,
                                LaneValues<float, kPerLane>& slopes) {
  float total = 1.0F;
  float mean = 0.0F;
  if (by_shares) {
    float sum = 0.0F;
    each_expert<kPerLane>(rules.num_experts, [&](int i, int e) {
      sum += scores[i];
      mean += scores[i] * by_score[e];
    });
    total = warp_sum(sum) + kDivisorEpsilon;
    mean = warp_sum(mean) / total;
  }
  each_expert<kPerLane>(rules.num_experts,
                        [&](int i, int e) { slopes[i] += (by_score[e] - mean) / total; });
}

// Writes the gradient of the logits. `by_probability` is the part that comes from the z-loss, as a
// multiple of the softmax exp(logit − log_sum_exp).
template <int kPerLane>
__device__ void write_d_logits(const TokenRules& rules, const DLogitsRow& row,
                               LaneValues<float, kPerLane>& scores,
                               LaneValues<float, kPerLane>& slopes, float by_probability,
                               float log_sum_exp) {
  float mean = 0.0F;
  if (rules.is_softmax) {
    each_expert<kPerLane>(rules.num_experts, [&](int i, int) { mean += slopes[i] * scores[i]; });
    mean = warp_sum(mean);
  }
  each_expert<kPerLane>(rules.num_experts, [&](int i, int e) {
    const float slope = rules.is_softmax ? 1.0F : 1.0F - scores[i];
    float d_logit = scores[i] * slope * (slopes[i] - mean);
    if (by_probability != 0.0F) d_logit += by_probability * expf(row.logits[e] - log_sum_exp);
    row.set(e, d_logit);
  });
}

// Returns false if the token takes no part: no gradient reaches its logits, or they are not finite.
template <int kPerLane>
__device__ bool token_backward(const BackwardArgs& p, std::int64_t token, const DLogitsRow& row) {
  if (p.valid != nullptr && p.valid[token * p.valid_stride] == 0) return false;
  const TokenPicks picks(p, token);
  const bool has_slopes = p.by_score != nullptr || p.by_square != nullptr;
  if (!has_slopes && !picks.has_any()) return false;
  const auto& rules = p.rules;
  LaneValues<float, kPerLane> scores(p.all_scores + token * rules.num_experts);
  if (!score<kPerLane>(rules, row.logits, scores)) return false;
  LaneValues<float, kPerLane> slopes(p.all_slopes + token * rules.num_experts);
  weight_slopes<kPerLane>(rules, picks, scores, slopes);
  if (p.by_score != nullptr) {
    const float* by_score = p.by_score + token / p.sequence_tokens * p.by_score_stride;
    add_loss_slopes<kPerLane>(rules, by_score, p.by_shares, scores, slopes);
  }
  const float by_square = p.by_square != nullptr ? *p.by_square : 0.0F;
  const float over_all = by_square != 0.0F ? log_sum_exp<kPerLane>(rules, row.logits) : 0.0F;
  write_d_logits<kPerLane>(rules, row, scores, slopes, 2.0F * by_square * over_all, over_all);
  return true;
}

template <int kPerLane>
__global__ __launch_bounds__(32 * kWarpsPerBlock) void d_logits_kernel(BackwardArgs p) {
  start_in_turn();
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  const DLogitsRow row(p, token);
  const bool has_part = token_backward<kPerLane>(p, token, row);
  if (!has_part) {
    each_expert<kPerLane>(p.rules.num_experts, [&](int, int e) { row.set(e, 0.0F); });
  }
  if (lane_of_thread() == 0) p.has_part[token] = has_part ? 1 : 0;
}

BackwardArgs backward_args(const RouteTokensBackward& args, const DLogits& d_logits,
                           const TensorView& has_part) {
  const auto& in = args.in;
  BackwardArgs p{.rules = TokenRules(args.options, args.weights)};
  p.num_tokens = in.x.rows();
  p.logits = reinterpret_cast<float*>(d_logits.values.data());
  p.logits_stride = d_logits.values.row_stride();
  const bool only_terms = in.x.dtype() == Dtype::bf16 && args.weights.gate.dtype() == Dtype::bf16;
  p.wants_values = !only_terms || is_given(args.out.gradients.gate_bias);
  p.main = reinterpret_cast<__nv_bfloat16*>(d_logits.main.data());
  p.rest = reinterpret_cast<__nv_bfloat16*>(d_logits.rest.data());
  p.terms_stride = d_logits.main.row_stride();
  p.has_part = reinterpret_cast<std::int32_t*>(has_part.data());
  if (in.valid) {
    p.valid = reinterpret_cast<const std::int32_t*>(in.valid->data());
    p.valid_stride = in.valid->row_stride();
  }
  p.ids = reinterpret_cast<const std::int32_t*>(in.expert_ids.data());
  p.ids_stride = in.expert_ids.row_stride();
  p.d_weights = reinterpret_cast<const float*>(in.d_weights.data());
  p.d_weights_stride = in.d_weights.row_stride();
  p.sequence_tokens = 1;
  if (args.slopes == nullptr) return p;
  p.sequence_tokens = args.slopes->sequence_tokens;
  p.by_shares = args.slopes->scores == LossScores::shares;
  if (args.slopes->by_score) {
    p.by_score = reinterpret_cast<const float*>(args.slopes->by_score->data());
    p.by_score_stride = args.slopes->by_score->row_stride();
  }
  if (args.slopes->by_square) {
    p.by_square = reinterpret_cast<const float*>(args.slopes->by_square->data());
  }
  return p;
}

void launch_d_logits(BackwardArgs p, Context& context) {
  const auto blocks = static_cast<unsigned>((p.num_tokens + kWarpsPerBlock - 1) / kWarpsPerBlock);
  with_experts_per_lane(p.rules.num_experts, [&](auto per_lane) {
    constexpr int kPerLane = decltype(per_lane)::value;
    TensorView memory;
    if (kPerLane == 0) {
      memory = context.take({2, p.num_tokens * p.rules.num_experts}, Dtype::f32);
      p.all_scores = reinterpret_cast<float*>(memory.data());
      p.all_slopes = p.all_scores + p.num_tokens * p.rules.num_experts;
    }
    launch_early(d_logits_kernel<kPerLane>, {blocks, 32 * kWarpsPerBlock}, p, "d_logits_kernel",
                 context);
  });
}

DLogits take_d_logits(const ConstTensorView& x, std::int64_t num_experts, Context& context) {
  const auto num_tokens = x.rows();
  DLogits d_logits{.values = take_logits(num_tokens, num_experts, context)};
  if (x.dtype() == Dtype::bf16) {
    const auto stride = (num_experts + 7) / 8 * 8;
    d_logits.main = context.take({num_tokens, stride}, Dtype::bf16);
    d_logits.rest = context.take({num_tokens, stride}, Dtype::bf16);
  }
  return d_logits;
}

}  // namespace

void route_tokens_backward(const RouteTokensBackward& args, Context& context) {
  const auto& in = args.in;
  const auto num_tokens = in.x.rows();
  const DLogits d_logits = take_d_logits(in.x, args.options.num_experts, context);
  const TensorView has_part = context.take({num_tokens}, Dtype::i32);
  if (num_tokens > 0) {
    gate_logits(in.x, args.weights, d_logits.values, context);
    launch_d_logits(backward_args(args, d_logits, has_part), context);
    add_gate_d_x(d_logits, args.weights.gate, args.out.d_x, context);
  }
  gate_gradients({.d_logits = d_logits,
                  .has_part = has_part,
                  .x = in.x,
                  .gradients = args.out.gradients,
                  .mode = args.out.mode},
                 context);
}

}  // namespace switchyard::cuda
