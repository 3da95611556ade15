// SPDX-License-Identifier: Apache-2.0
// Picks experts for tokens: scores, choice and weights, forward and backward.
#pragma once

#include <cstdint>
#include <optional>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

// The function that turns the logits x·Wᵀ [+ gate bias] into scores, in f32.
enum class ScoreFunction { softmax, sigmoid };

// Selects what the score bias is added to.
enum class ScoreBias {
  none,
  choice,  // the compared scores, not those that become weights (DeepSeek-V3, TorchTitan)
  logits,  // the logits, so it affects the weights too (KempnerForge's sigmoid router)
};

// How the scores of the chosen experts become routing weights.
enum class Normalise {
  none,    // weight = scale · score
  chosen,  // weight = scale · score / (Σ of the chosen scores + 1e-20)
};

// How experts are chosen for a token.
enum class Choice {
  top_k,     // the K best; ties go to the lower expert id
  balanced,  // (t·K + k) mod E over this rank's tokens, for benchmarks; weights as usual
};

// Options of a Router.
struct RouterOptions {
  int num_experts = 0;
  std::int64_t top_k = 0;
  ScoreFunction score = ScoreFunction::softmax;
  ScoreBias score_bias = ScoreBias::none;
  Normalise normalise = Normalise::chosen;
  float scale = 1.0F;
  // Limits the choice to some groups of experts. Experts form num_expert_groups equal groups of
  // consecutive ids, and picks come only from the kept_expert_groups groups with the highest sum of
  // their two best scores.
  int num_expert_groups = 1;
  int kept_expert_groups = 1;
  Choice choice = Choice::top_k;

  // Return the defaults of the named models. Change the options in which your model differs.
  SWITCHYARD_API static RouterOptions mixtral(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions qwen3_moe(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions olmoe(int num_experts, std::int64_t top_k);
  // Keeps 4 of 8 groups; the scale is 2.5.
  SWITCHYARD_API static RouterOptions deepseek_v3(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions torchtitan(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions kempner_forge_softmax(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions kempner_forge_sigmoid(int num_experts, std::int64_t top_k);
};

// The tensors of a router: gate [E, H] and gate_bias [E] of f32 or bf16, and score_bias [E] of f32.
// A default view means that there is no such tensor.
template <typename View>
struct BasicRouterTensors {
  View gate;
  View gate_bias = {};
  // Gradients leave this empty. With ScoreBias::logits its gradient equals that of gate_bias, so
  // give the router a gate_bias (of zeros, if it has none) to get it.
  View score_bias = {};
};
using RouterWeights = BasicRouterTensors<ConstTensorView>;
using RouterGradients = BasicRouterTensors<TensorView>;

// The experts and weights of every token. Tensors are in the memory of the router's device.
struct Routing {
  Tensor expert_ids;  // [T, K] i32; −1: no pick
  Tensor weights;     // [T, K] f32; 0 where there is no pick
  // Problems found, [5] i64, for Planner::plan to report.
  Tensor problems = {};
  // The first token whose logits are not all finite; −1 if there is none. Such a token has no
  // picks. On a GPU this stays −1, because the host does not know; only `problems` holds it.
  std::int64_t first_non_finite_token = -1;
};

// Says how to treat ids of a replay that are out of range or repeat an earlier id of their token.
enum class BadIds {
  stay,         // left for a plan to reject
  become_none,  // become −1, and Routing::problems records the first of them
};

// The arguments of Router::route. Tensors are in the memory of the router's device.
struct RouterInput {
  ConstTensorView x;                               // [T, H] f32 or bf16
  std::optional<ConstTensorView> expert_ids = {};  // [T, K] i32: replays a choice
  // Marks padding with 0, [T] i32. Padding gets no picks and is not counted.
  std::optional<ConstTensorView> valid = {};
  BadIds bad_ids = BadIds::stay;
};

// The tensors that Router::backward reads.
struct RouterBackwardInput {
  ConstTensorView x;                          // [T, H] as routed
  ConstTensorView expert_ids;                 // [T, K] as routed
  ConstTensorView d_weights;                  // [T, K] f32
  std::optional<ConstTensorView> valid = {};  // [T] as routed
};
// The tensors that Router::backward writes.
struct RouterBackwardOutput {
  TensorView d_x;  // [T, H]: always added to, because it already holds the experts' part
  RouterGradients gradients;
  GradientMode mode = GradientMode::overwrite;
};

// Scores tokens with a gate and picks their experts. Not collective: a token's result depends on
// that token alone, to the bit. Keeps nothing; backward recomputes the scores. Tensors that do not
// fit throw InvalidArgument.
class SWITCHYARD_API Router {
 public:
  explicit Router(const RouterOptions& options, Device device = {});

  // Routes the tokens of this rank.
  Routing route(const RouterWeights& weights, const RouterInput& in) const;
  // Routes x [T, H] f32 or bf16.
  Routing route(const RouterWeights& weights, const ConstTensorView& x) const {
    return route(weights, RouterInput{.x = x});
  }
  // Returns the weights of the given ids [T, K] i32. The choice is fixed, but the gate still gets a
  // gradient.
  Routing replay(const RouterWeights& weights, const ConstTensorView& x,
                 const ConstTensorView& expert_ids) const {
    return route(weights, RouterInput{.x = x, .expert_ids = expert_ids});
  }

  // Computes the gradients of x, and of the gate and its bias over this rank's tokens.
  void backward(const RouterWeights& weights, const RouterBackwardInput& in,
                const RouterBackwardOutput& out) const;

  // Throws InvalidArgument if the weights do not fit tokens of `hidden` elements, are not in the
  // device's memory, or, on a CPU only, hold a score bias that is not finite.
  void check(const RouterWeights& weights, std::int64_t hidden) const;

  const RouterOptions& options() const { return options_; }

 private:
  RouterOptions options_;
  Device device_;
};

}  // namespace switchyard
