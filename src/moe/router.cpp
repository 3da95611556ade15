// SPDX-License-Identifier: Apache-2.0
// Options, presets and checks; the device does the work.
#include "switchyard/router.h"

#include <cmath>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/check_tensors.h"
#include "moe/plan/plan_record.h"
#include "moe/route.h"

namespace switchyard {
namespace {

void require_valid(const RouterOptions& o) {
  require(o.num_experts > 0, "num_experts ({}) must be positive", o.num_experts);
  require(0 < o.top_k && o.top_k <= kMaxTopK, "top_k ({}) must be 1 to {}", o.top_k,
          std::int64_t{kMaxTopK});
  require(std::isfinite(o.scale), "scale ({}) must be finite", o.scale);
  require(o.num_expert_groups > 0 && o.num_experts % o.num_expert_groups == 0,
          "num_experts ({}) must be a multiple of num_expert_groups ({})", o.num_experts,
          o.num_expert_groups);
  require(0 < o.kept_expert_groups && o.kept_expert_groups <= o.num_expert_groups,
          "kept_expert_groups ({}) must be 1 to num_expert_groups ({})", o.kept_expert_groups,
          o.num_expert_groups);
  const auto candidates = std::int64_t{o.num_experts} / o.num_expert_groups * o.kept_expert_groups;
  require(o.top_k <= candidates || o.num_expert_groups > 1,
          "top_k ({}) must not exceed num_experts ({})", o.top_k, o.num_experts);
  require(o.top_k <= candidates, "top_k ({}) must not exceed the {} experts of {} kept groups",
          o.top_k, candidates, o.kept_expert_groups);
}

RouterOptions softmax_router(int num_experts, std::int64_t top_k, Normalise normalise) {
  return {.num_experts = num_experts, .top_k = top_k, .normalise = normalise};
}

void require_tokens(const ConstTensorView& x, Memory memory) {
  require_memory(x, memory, "x");
  require((x.dtype() == Dtype::f32 || x.dtype() == Dtype::bf16) && x.shape().rank() == 2,
          "x is {} {}, but must be [T, H] of f32 or bf16", name_of(x.dtype()), x.shape());
}

void require_ids(const ConstTensorView& ids, const Shape& expected, Memory memory) {
  require_memory(ids, memory, "expert_ids");
  require(ids.dtype() == Dtype::i32 && ids.shape() == expected,
          "expert_ids is {} {}, but must be i32 {}", name_of(ids.dtype()), ids.shape(), expected);
}

void require_mask(const std::optional<ConstTensorView>& valid, std::int64_t num_tokens,
                  Memory memory) {
  if (!valid) return;
  require_memory(*valid, memory, "valid");
  require(valid->dtype() == Dtype::i32 && valid->shape() == Shape{num_tokens},
          "valid is {} {}, but must be i32 [{}]", name_of(valid->dtype()), valid->shape(),
          num_tokens);
}

void require_known(const ConstTensorView& ids, int num_experts) {
  for (std::int64_t t = 0; t < ids.rows(); ++t) {
    const auto* row = reinterpret_cast<const std::int32_t*>(ids.row(t));
    for (std::int64_t k = 0; k < ids.shape()[1]; ++k) {
      require(-1 <= row[k] && row[k] < num_experts,
              "expert_ids[{},{}] is {}, which is neither -1 nor an expert of {}", t, k, row[k],
              num_experts);
    }
  }
}

Routing empty_routing(const Device& device, const Shape& picks) {
  return {.expert_ids = device.empty(picks, Dtype::i32),
          .weights = device.empty(picks, Dtype::f32),
          .problems = device.empty({kProblemWords}, Dtype::i64)};
}

}  // namespace

RouterOptions RouterOptions::mixtral(int num_experts, std::int64_t top_k) {
  return softmax_router(num_experts, top_k, Normalise::chosen);
}
RouterOptions RouterOptions::qwen3_moe(int num_experts, std::int64_t top_k) {
  return softmax_router(num_experts, top_k, Normalise::chosen);
}
RouterOptions RouterOptions::olmoe(int num_experts, std::int64_t top_k) {
  return softmax_router(num_experts, top_k, Normalise::none);
}
RouterOptions RouterOptions::kempner_forge_softmax(int num_experts, std::int64_t top_k) {
  return softmax_router(num_experts, top_k, Normalise::chosen);
}
RouterOptions RouterOptions::deepseek_v3(int num_experts, std::int64_t top_k) {
  return {.num_experts = num_experts,
          .top_k = top_k,
          .score = ScoreFunction::sigmoid,
          .score_bias = ScoreBias::choice,
          .scale = 2.5F,
          .num_expert_groups = 8,
          .kept_expert_groups = 4};
}
RouterOptions RouterOptions::torchtitan(int num_experts, std::int64_t top_k) {
  return {.num_experts = num_experts,
          .top_k = top_k,
          .score = ScoreFunction::sigmoid,
          .score_bias = ScoreBias::choice,
          .normalise = Normalise::none};
}
RouterOptions RouterOptions::kempner_forge_sigmoid(int num_experts, std::int64_t top_k) {
  return {.num_experts = num_experts,
          .top_k = top_k,
          .score = ScoreFunction::sigmoid,
          .score_bias = ScoreBias::logits};
}

Router::Router(const RouterOptions& options, Device device)
    : options_(options), device_(std::move(device)) {
  require_valid(options);
}

void Router::check(const RouterWeights& weights, std::int64_t hidden) const {
  const auto experts = std::int64_t{options_.num_experts};
  const Memory memory = device_.memory();
  require(hidden > 0, "hidden ({}) must be positive", hidden);
  require_matrix(weights.gate, {experts, hidden}, "gate");
  require_memory(weights.gate, memory, "gate");
  require_memory_if_given(weights.gate_bias, memory, "gate_bias");
  require_memory_if_given(weights.score_bias, memory, "score_bias");
  if (is_given(weights.gate_bias)) require_vector(weights.gate_bias, experts, "gate_bias");
  if (!is_given(weights.score_bias)) return;
  require(options_.score_bias != ScoreBias::none,
          "a score_bias was given, but the router's options have score_bias = none");
  require_vector(weights.score_bias, experts, "score_bias");
  require(weights.score_bias.dtype() == Dtype::f32, "score_bias is {}, but must be f32",
          name_of(weights.score_bias.dtype()));
  if (memory != Memory::host) return;
  const auto biases = weights.score_bias.span<float>();
  for (std::size_t e = 0; e < biases.size(); ++e) {
    require(std::isfinite(biases[e]), "score_bias[{}] is {}, but must be finite", e, biases[e]);
  }
}

Routing route(const Device& device, const RouterOptions& options, const RouterWeights& weights,
              const RouterInput& in, const RouterSums* sums) {
  Routing routing = empty_routing(device, {in.x.rows(), options.top_k});
  backend_of(device).route_tokens({.options = options,
                                   .weights = weights,
                                   .in = in,
                                   .sums = sums,
                                   .expert_ids = routing.expert_ids,
                                   .routing_weights = routing.weights,
                                   .problems = routing.problems});
  if (device.memory() == Memory::host) {
    routing.first_non_finite_token = routing.problems.span<std::int64_t>()[kNonFiniteToken];
  }
  return routing;
}

Routing given_routing(const Device& device, const RouterOptions& options, const RouterInput& in,
                      const ConstTensorView& weights, const RouterSums* sums) {
  Routing routing = empty_routing(device, {in.x.rows(), options.top_k});
  backend_of(device).route_tokens({.options = options,
                                   .weights = {},
                                   .in = in,
                                   .sums = sums,
                                   .expert_ids = routing.expert_ids,
                                   .routing_weights = routing.weights,
                                   .problems = routing.problems,
                                   .given_weights = weights});
  return routing;
}

Routing Router::route(const RouterWeights& weights, const RouterInput& in) const {
  const Memory memory = device_.memory();
  require_tokens(in.x, memory);
  check(weights, in.x.shape()[1]);
  if (in.expert_ids) require_ids(*in.expert_ids, {in.x.rows(), options_.top_k}, memory);
  require_mask(in.valid, in.x.rows(), memory);
  return switchyard::route(device_, options_, weights, in, nullptr);
}

void Router::backward(const RouterWeights& weights, const RouterBackwardInput& in,
                      const RouterBackwardOutput& out) const {
  const Memory memory = device_.memory();
  require_tokens(in.x, memory);
  const auto hidden = in.x.shape()[1];
  check(weights, hidden);
  const Shape picks{in.x.rows(), options_.top_k};
  require_ids(in.expert_ids, picks, memory);
  require_mask(in.valid, in.x.rows(), memory);
  if (memory == Memory::host) require_known(in.expert_ids, options_.num_experts);
  require_memory(in.d_weights, memory, "d_weights");
  require_memory(out.d_x, memory, "d_x");
  require_memory_if_given(out.gradients.gate, memory, "the gradient of gate");
  require_memory_if_given(out.gradients.gate_bias, memory, "the gradient of gate_bias");
  require(in.d_weights.dtype() == Dtype::f32 && in.d_weights.shape() == picks,
          "d_weights is {} {}, but must be f32 {}", name_of(in.d_weights.dtype()),
          in.d_weights.shape(), picks);
  require(out.d_x.dtype() == in.x.dtype() && out.d_x.shape() == in.x.shape(),
          "d_x is {} {}, but x is {} {}", name_of(out.d_x.dtype()), out.d_x.shape(),
          name_of(in.x.dtype()), in.x.shape());
  require_gradient(out.gradients.gate, weights.gate, "gate");
  require_gradient(out.gradients.gate_bias, weights.gate_bias, "gate_bias");
  require_apart(in.x, out.d_x, "x and d_x");
  backend_of(device_).route_tokens_backward({options_, weights, in, out});
}

}  // namespace switchyard
