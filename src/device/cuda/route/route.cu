// SPDX-License-Identifier: Apache-2.0
// Routing on a GPU: computes the logits, then the scores, choice and weights with one warp per
// token, then the sums.
#include <cuda_runtime.h>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/route/route_choice.cuh"
#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_sums.h"
#include "device/cuda/route/route_token.cuh"

namespace switchyard::cuda {
namespace {

struct PickArgs {
  TokenRules rules;
  std::int64_t num_tokens = 0;
  float* logits = nullptr;  // [T, E]; overwritten with the scores if keeps_scores
  std::int64_t logits_stride = 0;
  const std::int32_t* valid = nullptr;  // [T] or null
  std::int64_t valid_stride = 0;
  const std::int32_t* given_ids = nullptr;  // [T, K] or null
  std::int64_t given_stride = 0;
  const float* given_weights = nullptr;  // [T, K] or null
  std::int64_t given_weights_stride = 0;
  bool is_balanced = false;
  bool bad_ids_become_none = false;
  std::int32_t* ids = nullptr;
  std::int64_t ids_stride = 0;
  float* weights = nullptr;
  std::int64_t weights_stride = 0;
  std::int64_t* problems = nullptr;
  float* counts = nullptr;  // see TokenSums; or null
  float* log_sum_exp = nullptr;
  bool keeps_scores = false;
  bool counts_shares = false;
  // Only for more experts than registers hold: [T, E], [T, E] and [T, num_expert_groups].
  float* all_scores = nullptr;
  unsigned* all_keys = nullptr;
  unsigned* all_expert_groups = nullptr;
};

// The output rows of one token.
struct TokenRow {
  std::int64_t token;
  int lane;
  std::int32_t* ids;
  float* weights;

  __device__ TokenRow(const PickArgs& p, std::int64_t token)
      : token(token),
        lane(lane_of_thread()),
        ids(p.ids + token * p.ids_stride),
        weights(p.weights + token * p.weights_stride) {}
};

__device__ void note_first(std::int64_t* word, std::int64_t position) {
  atomicMin(reinterpret_cast<long long*>(word), static_cast<long long>(position));
}

__device__ void pick_none(const PickArgs& p, const TokenRow& row) {
  for (int k = row.lane; k < p.rules.top_k; k += 32) {
    row.ids[k] = -1;
    row.weights[k] = 0.0F;
  }
  if (p.counts != nullptr && row.lane == 0) p.counts[row.token] = 0.0F;
}

// Writes the ids with the best scores, and their scores as weights. Returns the sum of the weights.
template <int kPerLane>
__device__ float pick_best(const PickArgs& p, const TokenRow& row,
                           LaneValues<float, kPerLane>& scores) {
  extern __shared__ unsigned expert_group_memory[];
  const auto& rules = p.rules;
  const std::int64_t experts = rules.num_experts;
  ExpertGroupMemory memory{
      expert_group_memory + threadIdx.x / 32 * (experts + rules.num_expert_groups), nullptr};
  memory.expert_groups = memory.keys + experts;
  if constexpr (kPerLane == 0) {
    memory = {p.all_keys + row.token * experts,
              p.all_expert_groups + row.token * rules.num_expert_groups};
  }
  LaneValues<unsigned, kPerLane> keys(memory.keys);
  compare_by<kPerLane>(rules, scores, keys, memory);
  float total = 0.0F;
  std::int32_t my_id = -1;
  for (int k = 0; k < rules.top_k; ++k) {
    const int id = take_best<kPerLane>(rules, keys);
    if (k % 32 == row.lane) my_id = id;
    if (k % 32 != 31 && k != rules.top_k - 1) continue;
    const float my_score = scores.of(my_id);
    total += my_score;
    const int mine = k / 32 * 32 + row.lane;
    if (mine <= k) {
      row.ids[mine] = my_id;
      row.weights[mine] = my_score;
    }
    my_id = -1;
  }
  return warp_sum(total);
}

// Returns the given or balanced id for k, which may be bad, or −1 past the end.
__device__ std::int32_t given_id(const PickArgs& p, const TokenRow& row, int k) {
  if (k >= p.rules.top_k) return -1;
  if (p.given_ids != nullptr) return p.given_ids[row.token * p.given_stride + k];
  return static_cast<std::int32_t>((row.token * p.rules.top_k + k) % p.rules.num_experts);
}

// True if an earlier k has this id. Must be called by all lanes, each with its k of the same 32.
__device__ bool is_repeat(const PickArgs& p, const TokenRow& row, int k, std::int32_t id) {
  const unsigned equal = __match_any_sync(kAllLanes, id);
  bool repeats = (equal & lanes_below(row.lane)) != 0;
  for (int earlier = 0; earlier < k / 32 * 32; ++earlier) {
    repeats = repeats || given_id(p, row, earlier) == id;
  }
  return repeats;
}

__device__ bool is_expert(const PickArgs& p, std::int32_t id) {
  return 0 <= id && id < p.rules.num_experts;
}

// Returns given_id, or −1 instead of a bad id if those become none. Must be called by all lanes,
// like is_repeat.
__device__ std::int32_t checked_id(const PickArgs& p, const TokenRow& row, int k) {
  const std::int32_t id = given_id(p, row, k);
  if (!p.bad_ids_become_none) return id;
  const bool repeats = is_repeat(p, row, k, id);
  if (id == -1 || (is_expert(p, id) && !repeats)) return id;
  note_first(p.problems + kBadToken, row.token * p.rules.top_k + k);
  return -1;
}

// Writes the given ids, and their scores as weights. Returns the sum of the weights.
template <int kPerLane>
__device__ float pick_given(const PickArgs& p, const TokenRow& row,
                            LaneValues<float, kPerLane>& scores) {
  float total = 0.0F;
  for (int base = 0; base < p.rules.top_k; base += 32) {
    const int k = base + row.lane;
    const std::int32_t id = checked_id(p, row, k);
    const float my_score = scores.of(is_expert(p, id) ? id : -1);
    total += my_score;
    if (k >= p.rules.top_k) continue;
    row.ids[k] = id;
    row.weights[k] = my_score;
  }
  return warp_sum(total);
}

template <int kPerLane>
__device__ void leave_for_sums(const PickArgs& p, const TokenRow& row, float* logits,
                               LaneValues<float, kPerLane>& scores, float log_sum_exp) {
  float over = 1.0F;
  if (p.counts_shares) {
    float sum = 0.0F;
    each_expert<kPerLane>(p.rules.num_experts, [&](int i, int) { sum += scores[i]; });
    over = warp_sum(sum) + kDivisorEpsilon;
  }
  if (p.keeps_scores) {
    each_expert<kPerLane>(p.rules.num_experts, [&](int i, int e) { logits[e] = scores[i]; });
  }
  if (row.lane != 0) return;
  p.counts[row.token] = over;
  if (p.log_sum_exp != nullptr) p.log_sum_exp[row.token] = log_sum_exp;
}

template <int kPerLane>
__global__ __launch_bounds__(32 * kWarpsPerBlock) void pick_kernel(PickArgs p) {
  start_in_turn();
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  const TokenRow row(p, token);
  if (p.valid != nullptr && p.valid[token * p.valid_stride] == 0) return pick_none(p, row);
  float* logits = p.logits + token * p.logits_stride;
  LaneValues<float, kPerLane> scores(p.all_scores + token * p.rules.num_experts);
  const float squared = p.log_sum_exp != nullptr ? log_sum_exp<kPerLane>(p.rules, logits) : 0.0F;
  if (!score<kPerLane>(p.rules, logits, scores)) {
    if (row.lane == 0) note_first(p.problems + kNonFiniteToken, token);
    return pick_none(p, row);
  }
  const bool is_given = p.given_ids != nullptr || p.is_balanced;
  const float total =
      is_given ? pick_given<kPerLane>(p, row, scores) : pick_best<kPerLane>(p, row, scores);
  const float factor = p.rules.scale / (p.rules.normalises ? total + kDivisorEpsilon : 1.0F);
  for (int k = row.lane; k < p.rules.top_k; k += 32) row.weights[k] *= factor;
  if (p.counts != nullptr) leave_for_sums<kPerLane>(p, row, logits, scores, squared);
}

// Writes ids and weights as given.
__global__ __launch_bounds__(32 * kWarpsPerBlock) void take_given_kernel(PickArgs p) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  const TokenRow row(p, token);
  if (p.valid != nullptr && p.valid[token * p.valid_stride] == 0) return pick_none(p, row);
  const float* given = p.given_weights + token * p.given_weights_stride;
  for (int base = 0; base < p.rules.top_k; base += 32) {
    const int k = base + row.lane;
    const std::int32_t id = checked_id(p, row, k);
    if (k >= p.rules.top_k) continue;
    row.ids[k] = id;
    row.weights[k] = is_expert(p, id) ? given[k] : 0.0F;
  }
  if (p.counts != nullptr && row.lane == 0) p.counts[token] = 1.0F;
}

// Fills in everything except the logits and what the sums need.
PickArgs pick_args(const RouteTokens& args) {
  PickArgs p{.rules = TokenRules(args.options, args.weights)};
  p.num_tokens = args.in.x.rows();
  if (args.in.valid) {
    p.valid = reinterpret_cast<const std::int32_t*>(args.in.valid->data());
    p.valid_stride = args.in.valid->row_stride();
  }
  if (args.in.expert_ids) {
    p.given_ids = reinterpret_cast<const std::int32_t*>(args.in.expert_ids->data());
    p.given_stride = args.in.expert_ids->row_stride();
    p.bad_ids_become_none = args.in.bad_ids == BadIds::become_none;
  }
  if (args.given_weights) {
    p.given_weights = reinterpret_cast<const float*>(args.given_weights->data());
    p.given_weights_stride = args.given_weights->row_stride();
  }
  p.is_balanced = args.options.choice == Choice::balanced;
  p.ids = reinterpret_cast<std::int32_t*>(args.expert_ids.data());
  p.ids_stride = args.expert_ids.row_stride();
  p.weights = reinterpret_cast<float*>(args.routing_weights.data());
  p.weights_stride = args.routing_weights.row_stride();
  p.problems = reinterpret_cast<std::int64_t*>(args.problems.data());
  return p;
}

// Takes scratch for what the sums need. The scores overwrite the logits.
TokenSums take_token_sums(const RouteTokens& args, const TensorView& logits, PickArgs& p,
                          Context& context) {
  TokenSums tokens;
  const RouterSums* sums = args.sums;
  if (sums == nullptr) return tokens;
  tokens.counts = context.take({p.num_tokens}, Dtype::f32);
  p.counts = reinterpret_cast<float*>(tokens.counts.data());
  if (sums->wants_scores()) {
    tokens.scores = logits;
    p.keeps_scores = true;
    p.counts_shares = sums->losses.scores == LossScores::shares;
  }
  if (sums->wants_squares()) {
    tokens.log_sum_exp = context.take({p.num_tokens}, Dtype::f32);
    p.log_sum_exp = reinterpret_cast<float*>(tokens.log_sum_exp->data());
  }
  return tokens;
}

unsigned blocks_of(const PickArgs& p) {
  return static_cast<unsigned>((p.num_tokens + kWarpsPerBlock - 1) / kWarpsPerBlock);
}

void launch_pick(PickArgs p, Context& context) {
  const unsigned blocks = blocks_of(p);
  const auto& rules = p.rules;
  const bool has_expert_groups = rules.kept_expert_groups < rules.num_expert_groups;
  with_experts_per_lane(rules.num_experts, [&](auto per_lane) {
    constexpr int kPerLane = decltype(per_lane)::value;
    TensorView memory;
    std::size_t shared = 0;
    if (kPerLane == 0) {
      const std::int64_t words = 2 * std::int64_t{rules.num_experts} + rules.num_expert_groups;
      memory = context.take({p.num_tokens * words}, Dtype::f32);
      p.all_scores = reinterpret_cast<float*>(memory.data());
      p.all_keys = reinterpret_cast<unsigned*>(p.all_scores + p.num_tokens * rules.num_experts);
      p.all_expert_groups = p.all_keys + p.num_tokens * rules.num_experts;
    } else if (has_expert_groups) {
      shared = kWarpsPerBlock * sizeof(unsigned) * (rules.num_experts + rules.num_expert_groups);
    }
    launch_early(pick_kernel<kPerLane>, {blocks, 32 * kWarpsPerBlock, shared}, p, "pick_kernel",
                 context);
  });
}

void launch_take_given(const PickArgs& p, Context& context) {
  take_given_kernel<<<blocks_of(p), 32 * kWarpsPerBlock, 0, context.stream()>>>(p);
  check(cudaGetLastError(), "take_given_kernel");
}

}  // namespace

void route_tokens(const RouteTokens& args, Context& context) {
  const auto num_tokens = args.in.x.rows();
  check(cudaMemsetAsync(args.problems.data(), kNoPositionByte, args.problems.bytes(),
                        context.stream()),
        "the words of problems");
  if (num_tokens == 0) return finish_routing(args, {}, context);
  PickArgs p = pick_args(args);
  if (args.given_weights) {
    const TokenSums picks = take_token_sums(args, {}, p, context);
    launch_take_given(p, context);
    return finish_routing(args, picks, context);
  }
  const TensorView logits = take_logits(num_tokens, args.options.num_experts, context);
  gate_logits(args.in.x, args.weights, logits, context);
  p.logits = reinterpret_cast<float*>(logits.data());
  p.logits_stride = logits.row_stride();
  const TokenSums tokens = take_token_sums(args, logits, p, context);
  launch_pick(p, context);
  finish_routing(args, tokens, context);
}

}  // namespace switchyard::cuda
