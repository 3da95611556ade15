// Picks experts for tokens: scores, choice and weights, forward and backward.
#pragma once

#include <cstdint>
#include <optional>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

// What the logits x·Wᵀ [+ gate bias] become, in f32.
enum class ScoreFunction { softmax, sigmoid };

// What the score bias is added to.
enum class ScoreBias {
  none,
  choice,  // the scores that are compared, not those that become weights (DeepSeek-V3, TorchTitan)
  logits,  // the logits, so it counts for the weights too (KempnerForge's sigmoid router)
};

enum class Normalise {
  none,    // weight = scale · score
  chosen,  // weight = scale · score / (Σ of the chosen scores + 1e-20)
};

enum class Choice {
  top_k,     // the best K; equal scores go to the lower expert id
  balanced,  // (t·K + k) mod E over this rank's tokens, for benchmarks; weights as ever
};

struct RouterOptions {
  int num_experts = 0;
  std::int64_t top_k = 0;
  ScoreFunction score = ScoreFunction::softmax;
  ScoreBias score_bias = ScoreBias::none;
  Normalise normalise = Normalise::chosen;
  float scale = 1.0F;
  // Experts are cut into num_expert_groups equal groups of consecutive ids; only the
  // kept_expert_groups best are chosen from, by the sum of the two best scores in each.
  int num_expert_groups = 1;
  int kept_expert_groups = 1;
  Choice choice = Choice::top_k;

  // As the models of these names do by default; change what yours does otherwise.
  SWITCHYARD_API static RouterOptions mixtral(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions qwen3_moe(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions olmoe(int num_experts, std::int64_t top_k);
  // 8 groups of which 4 are kept, scale 2.5.
  SWITCHYARD_API static RouterOptions deepseek_v3(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions torchtitan(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions kempner_forge_softmax(int num_experts, std::int64_t top_k);
  SWITCHYARD_API static RouterOptions kempner_forge_sigmoid(int num_experts, std::int64_t top_k);
};

// [E, H] and [E] of f32 or bf16; the score bias f32. A default view is none.
template <typename View>
struct BasicRouterTensors {
  View gate;
  View gate_bias = {};
  // Gradients leave it out. With ScoreBias::logits its gradient is that of gate_bias: give one, of
  // zeros if the router has none.
  View score_bias = {};
};
using RouterWeights = BasicRouterTensors<ConstTensorView>;
using RouterGradients = BasicRouterTensors<TensorView>;

// Where tokens go. Tensors are in the memory of the router's device.
struct Routing {
  Tensor expert_ids;  // [T, K] i32; −1: no pick
  Tensor weights;     // [T, K] f32; 0 where there is no pick
  // [5] i64: what went wrong, for Planner::plan to report.
  Tensor problems = {};
  // The first token whose logits are not all finite; −1: none. Such a token has no picks. On a GPU
  // the host does not know it: it stays −1, and only `problems` holds it.
  std::int64_t first_non_finite_token = -1;
};

// What becomes of a replay's ids that are no expert's, or repeat an earlier one of their token.
enum class BadIds {
  stay,         // for a plan to refuse
  become_none,  // −1, and the first of them is noted in Routing::problems
};

// Tensors are in the memory of the router's device.
struct RouterInput {
  ConstTensorView x;                               // [T, H] f32 or bf16
  std::optional<ConstTensorView> expert_ids = {};  // [T, K] i32: replays a choice
  // [T] i32: 0 marks padding, which gets no picks and is not counted.
  std::optional<ConstTensorView> valid = {};
  BadIds bad_ids = BadIds::stay;
};

struct RouterBackwardInput {
  ConstTensorView x;                          // [T, H] as routed
  ConstTensorView expert_ids;                 // [T, K] as routed
  ConstTensorView d_weights;                  // [T, K] f32
  std::optional<ConstTensorView> valid = {};  // [T] as routed
};
struct RouterBackwardOutput {
  TensorView d_x;  // [T, H]: always added to, since the experts' part is there already
  RouterGradients gradients;
  GradientMode mode = GradientMode::overwrite;
};

// Not collective: a token's result depends on that token alone, to the bit. Keeps nothing; backward
// computes the scores again.
class SWITCHYARD_API Router {
 public:
  explicit Router(const RouterOptions& options, Device device = {});

  Routing route(const RouterWeights& weights, const RouterInput& in) const;
  // x [T, H] f32 or bf16.
  Routing route(const RouterWeights& weights, const ConstTensorView& x) const {
    return route(weights, RouterInput{.x = x});
  }
  // The weights that these ids [T, K] get: the choice is given, the gate still learns.
  Routing replay(const RouterWeights& weights, const ConstTensorView& x,
                 const ConstTensorView& expert_ids) const {
    return route(weights, RouterInput{.x = x, .expert_ids = expert_ids});
  }

  // d_gate and d_gate_bias are over this rank's tokens.
  void backward(const RouterWeights& weights, const RouterBackwardInput& in,
                const RouterBackwardOutput& out) const;

  // Throws InvalidArgument if the weights do not fit rows of `hidden` elements, are not in the
  // device's memory, or hold a score bias that is not finite; on a GPU that last is not looked at.
  void check(const RouterWeights& weights, std::int64_t hidden) const;

  const RouterOptions& options() const { return options_; }

 private:
  RouterOptions options_;
  Device device_;
};

}  // namespace switchyard
