// SPDX-License-Identifier: Apache-2.0
#include "support/device/route_problem.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "support/compare.h"
#include "support/random.h"

namespace switchyard::testing {
namespace {

RouterOptions grouped(int num_experts, std::int64_t top_k, int num_expert_groups,
                      int kept_expert_groups) {
  auto options = RouterOptions::torchtitan(num_experts, top_k);
  options.normalise = Normalise::chosen;
  options.scale = -1.5F;
  options.num_expert_groups = num_expert_groups;
  options.kept_expert_groups = kept_expert_groups;
  return options;
}

std::optional<Tensor> put(const Device& device, const std::optional<Tensor>& host) {
  return host ? std::optional(device.copy_of(*host)) : std::nullopt;
}
std::optional<TensorView> view_of(std::optional<Tensor>& tensor) {
  return tensor ? std::optional<TensorView>(tensor->view()) : std::nullopt;
}

// The inputs in device memory.
struct DeviceInputs {
  DeviceInputs(const Device& device, RouteInputs& inputs)
      : x(device.copy_of(inputs.x)),
        gate(device.copy_of(inputs.gate)),
        gate_bias(put(device, inputs.gate_bias)),
        score_bias(put(device, inputs.score_bias)),
        valid(put(device, inputs.valid)),
        expert_ids(put(device, inputs.expert_ids)) {
    weights.gate = first_columns(gate, inputs.test.hidden);
    if (gate_bias) weights.gate_bias = gate_bias->view();
    if (score_bias) weights.score_bias = score_bias->view();
  }

  Tensor x;
  Tensor gate;
  std::optional<Tensor> gate_bias, score_bias, valid, expert_ids;
  RouterWeights weights;
};

// Σ_e d_score(e) · ∂score(e)/∂logit for one token.
std::vector<double> logit_slopes(const RouterOptions& options, const double* scores,
                                 const std::vector<double>& d_scores) {
  const bool is_softmax = options.score == ScoreFunction::softmax;
  double mean = 0.0;
  for (std::size_t e = 0; e < d_scores.size(); ++e) mean += d_scores[e] * scores[e];
  std::vector<double> slopes(d_scores.size());
  for (std::size_t e = 0; e < slopes.size(); ++e) {
    slopes[e] =
        is_softmax ? scores[e] * (d_scores[e] - mean) : scores[e] * (1.0 - scores[e]) * d_scores[e];
  }
  return slopes;
}

// Returns the gradients of one token's scores, from those of its weights.
std::vector<double> score_slopes(const RouterOptions& options, const double* scores,
                                 const std::int32_t* ids, const float* d_weights) {
  std::vector<double> slopes(static_cast<std::size_t>(options.num_experts));
  double total = 0.0;
  double weighted = 0.0;
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    if (ids[k] < 0) continue;
    total += scores[ids[k]];
    weighted += scores[ids[k]] * double{d_weights[k]};
  }
  const bool normalises = options.normalise == Normalise::chosen;
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    if (ids[k] < 0) continue;
    const double slope =
        normalises ? d_weights[k] / total - weighted / (total * total) : double{d_weights[k]};
    slopes[static_cast<std::size_t>(ids[k])] += options.scale * slope;
  }
  return slopes;
}

void add_loss_slopes(std::vector<double>& slopes, const double* scores, const RouteSlopes& losses,
                     std::int64_t token) {
  if (!losses.by_score) return;
  const auto n = slopes.size();
  const auto row = losses.by_score->span<float>().subspan(
      static_cast<std::size_t>(token / losses.sequence_tokens) * n, n);
  const bool shares = losses.scores == LossScores::shares;
  const double total = shares ? std::accumulate(scores, scores + n, 0.0) : 1.0;
  const double mean = shares ? std::inner_product(scores, scores + n, row.begin(), 0.0) / total : 0;
  for (std::size_t e = 0; e < n; ++e) slopes[e] += (row[e] - mean) / total;
}

// Adds the gradients of by_square · logsumexp² to d_logits.
void add_square_slopes(std::vector<double>& d_logits, const std::vector<double>& logits,
                       const RouteSlopes& losses) {
  if (!losses.by_square) return;
  double sum = 0.0;
  for (const double logit : logits) sum += std::exp(logit);
  const double factor = 2.0 * losses.by_square->span<float>()[0] * std::log(sum) / sum;
  for (std::size_t e = 0; e < logits.size(); ++e) d_logits[e] += factor * std::exp(logits[e]);
}

std::vector<double> logits_of(const ReferenceRouter& router, const Doubles& x, std::int64_t token) {
  std::vector<double> logits(static_cast<std::size_t>(router.gate.rows()));
  for (std::size_t e = 0; e < logits.size(); ++e) {
    const double* row = router.gate.row(static_cast<std::int64_t>(e));
    logits[e] = std::inner_product(row, row + x.shape[1], x.row(token),
                                   router.gate_bias.is_given() ? router.gate_bias.values[e] : 0.0);
  }
  return logits;
}

}  // namespace

std::vector<RouteCase> route_cases() {
  constexpr auto f32 = Dtype::f32;
  constexpr auto bf16 = Dtype::bf16;
  auto balanced = RouterOptions::mixtral(7, 3);
  balanced.choice = Choice::balanced;
  auto many = grouped(1536, 40, 6, 2);
  many.score = ScoreFunction::softmax;
  return {
      {"mixtral", RouterOptions::mixtral(8, 2), 133, 72, f32, f32},
      {"mixtral_bf16", RouterOptions::mixtral(8, 2), 133, 72, bf16, bf16, true},
      {"qwen3", RouterOptions::qwen3_moe(128, 8), 200, 64, f32, f32, true, 3},
      {"qwen3_bf16", RouterOptions::qwen3_moe(128, 8), 300, 1032, bf16, bf16},
      {"qwen3_bf16_odd", RouterOptions::qwen3_moe(128, 8), 70, 67, bf16, bf16, true, 2},
      {"olmoe_mixed", RouterOptions::olmoe(64, 8), 65, 130, bf16, f32, true},
      {"olmoe_mixed_back", RouterOptions::olmoe(64, 8), 65, 130, f32, bf16, true, 1},
      {"deepseek_v3", RouterOptions::deepseek_v3(256, 8), 97, 96, bf16, bf16},
      {"groups_of_one", grouped(12, 3, 12, 5), 40, 33, f32, f32},
      {"kempner_forge", RouterOptions::kempner_forge_sigmoid(40, 3), 50, 24, f32, f32, true},
      {"every_expert", RouterOptions::torchtitan(9, 9), 20, 16, f32, f32},
      {"balanced", balanced, 31, 16, bf16, bf16},
      {"large_k", RouterOptions::qwen3_moe(1024, 33), 37, 40, f32, f32},
      {"most_experts", many, 21, 48, bf16, bf16, true},
      {"ragged_bf16", RouterOptions::qwen3_moe(70, 8), 130, 2056, bf16, bf16, true},
      {"blocks_of_experts_bf16", RouterOptions::qwen3_moe(330, 9), 140, 136, bf16, bf16, true, 1},
      {"odd_experts_bf16", RouterOptions::qwen3_moe(129, 8), 133, 136, bf16, bf16, true, 8},
      {"seven_experts_bf16", RouterOptions::mixtral(7, 2), 65, 64, bf16, bf16, true},
      {"one_expert_bf16", RouterOptions::torchtitan(1, 1), 70, 72, bf16, bf16, true},
      {"one_token", RouterOptions::mixtral(4, 2), 1, 8, bf16, bf16}};
}

TensorView first_columns(Tensor& rows, std::int64_t columns) {
  const TensorView all = rows;
  return {all.data(),       all.dtype(), {all.rows(), columns},
          all.row_stride(), all.owner(), all.memory()};
}

RouteInputs::RouteInputs(const RouteCase& route_case) : test(route_case) {
  Random random(17);
  const std::int64_t experts = test.options.num_experts;
  x = random.tensor({test.num_tokens, test.hidden + test.gap}, test.x);
  gate = random.tensor({experts, test.hidden + test.gap}, test.gate);
  if (test.gate_bias) gate_bias = random.tensor({experts}, test.gate);
  if (test.options.score_bias != ScoreBias::none) score_bias = random.tensor({experts}, Dtype::f32);
}

void set_element(const TensorView& matrix, std::int64_t row, std::int64_t column, float value) {
  std::byte* at = matrix.row(row) + column * size_of(matrix.dtype());
  if (matrix.dtype() == Dtype::bf16) {
    *reinterpret_cast<Bfloat16*>(at) = to_bfloat16(value);
  } else {
    *reinterpret_cast<float*>(at) = value;
  }
}

void RouteInputs::pad_every_third() {
  valid = Tensor({test.num_tokens}, Dtype::i32);
  for (std::int64_t t = 0; t < test.num_tokens; ++t) {
    valid->span<std::int32_t>()[static_cast<std::size_t>(t)] = t % 3 != 0 ? 7 : 0;
    if (t % 3 == 0) set_element(x, t, 0, std::numeric_limits<float>::quiet_NaN());
  }
}

double reference_log_sum_exp(const ReferenceRouter& router, const Doubles& x, std::int64_t token) {
  double sum = 0.0;
  for (const double logit : logits_of(router, x, token)) sum += std::exp(logit);
  return std::log(sum);
}

ReferenceRouter RouteInputs::reference_router() {
  RouterWeights weights{.gate = first_columns(gate, test.hidden)};
  if (gate_bias) weights.gate_bias = gate_bias->view();
  if (score_bias) weights.score_bias = score_bias->view();
  return doubles_of(weights);
}

Doubles RouteInputs::reference_scores() {
  auto all = test.options;
  all.top_k = all.num_experts;
  all.normalise = Normalise::none;
  all.scale = 1.0F;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(test.num_tokens * all.top_k));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(all.top_k));
  }
  return reference_replay(all, reference_router(), reference_x(), ids);
}

RouteResult route_on(const Device& device, RouteInputs& inputs, RouterSums* sums) {
  DeviceInputs on_device(device, inputs);
  const auto& options = inputs.test.options;
  const RouterInput in{.x = first_columns(on_device.x, inputs.test.hidden),
                       .expert_ids = view_of(on_device.expert_ids),
                       .valid = view_of(on_device.valid),
                       .bad_ids = inputs.bad_ids};
  // One extra column, since output rows may be strided.
  const Shape wide{inputs.test.num_tokens, options.top_k + 1};
  Tensor ids = device.copy_of(poisoned(wide, Dtype::i32));
  Tensor weights = device.copy_of(poisoned(wide, Dtype::f32));
  Tensor problems = device.copy_of(poisoned({kProblemWords}, Dtype::i64));
  std::optional<Tensor> given_rows = put(device, inputs.given_weights);
  std::optional<ConstTensorView> given;
  if (given_rows) given = first_columns(*given_rows, options.top_k);
  backend_of(device).route_tokens({.options = options,
                                   .weights = on_device.weights,
                                   .in = in,
                                   .sums = sums,
                                   .expert_ids = first_columns(ids, options.top_k),
                                   .routing_weights = first_columns(weights, options.top_k),
                                   .problems = problems,
                                   .given_weights = given});
  return {device.to_host(first_columns(ids, options.top_k)),
          device.to_host(first_columns(weights, options.top_k)), device.to_host(problems)};
}

RouteGradients backward_on(const Device& device, RouteInputs& inputs,
                           const RouteBackwardInputs& backward, const RouteGradients& start) {
  DeviceInputs on_device(device, inputs);
  Tensor ids = device.copy_of(backward.expert_ids);
  Tensor d_weights = device.copy_of(backward.d_weights);
  Tensor d_x = device.copy_of(start.d_x);
  Tensor d_gate = device.copy_of(start.gate);
  std::optional<Tensor> d_bias = put(device, start.bias);
  RouterSlopes slopes;
  std::optional<Tensor> by_score, by_square;
  if (backward.slopes != nullptr) {
    by_score = put(device, backward.slopes->by_score);
    by_square = put(device, backward.slopes->by_square);
    slopes = {.scores = backward.slopes->scores,
              .sequence_tokens = backward.slopes->sequence_tokens,
              .by_score = view_of(by_score),
              .by_square = view_of(by_square)};
  }
  const RouterBackwardInput in{.x = first_columns(on_device.x, inputs.test.hidden),
                               .expert_ids = ids,
                               .d_weights = d_weights,
                               .valid = view_of(on_device.valid)};
  const TensorView d_tokens = first_columns(d_x, inputs.test.hidden);
  RouterBackwardOutput out{.d_x = d_tokens, .gradients = {.gate = d_gate}, .mode = backward.mode};
  if (d_bias) out.gradients.gate_bias = d_bias->view();
  backend_of(device).route_tokens_backward({inputs.test.options, on_device.weights, in, out,
                                            backward.slopes == nullptr ? nullptr : &slopes});
  RouteGradients result{.d_x = device.to_host(d_tokens), .gate = device.to_host(d_gate)};
  if (d_bias) result.bias = device.to_host(*d_bias);
  return result;
}

RouteGradients reference_backward(RouteInputs& inputs, const RouteBackwardInputs& backward,
                                  const std::vector<bool>& without_part) {
  const auto& options = inputs.test.options;
  const auto hidden = inputs.test.hidden;
  const auto router = inputs.reference_router();
  const Doubles x = inputs.reference_x();
  const Doubles scores = inputs.reference_scores();
  Doubles d_x = zeros({inputs.test.num_tokens, hidden});
  Doubles d_gate = zeros({options.num_experts, hidden});
  Doubles d_bias = zeros({options.num_experts});
  for (std::int64_t t = 0; t < inputs.test.num_tokens; ++t) {
    if (without_part[static_cast<std::size_t>(t)]) continue;
    auto slopes = score_slopes(options, scores.row(t),
                               backward.expert_ids.span<std::int32_t>().data() + t * options.top_k,
                               backward.d_weights.span<float>().data() + t * options.top_k);
    if (backward.slopes != nullptr) add_loss_slopes(slopes, scores.row(t), *backward.slopes, t);
    auto d_logits = logit_slopes(options, scores.row(t), slopes);
    if (backward.slopes != nullptr) {
      add_square_slopes(d_logits, logits_of(router, x, t), *backward.slopes);
    }
    for (std::int64_t e = 0; e < options.num_experts; ++e) {
      const double d = d_logits[static_cast<std::size_t>(e)];
      d_bias.values[static_cast<std::size_t>(e)] += d;
      for (std::int64_t h = 0; h < hidden; ++h) {
        d_x.row(t)[h] += d * router.gate.row(e)[h];
        d_gate.row(e)[h] += d * x.row(t)[h];
      }
    }
  }
  RouteGradients result{.d_x = tensor_of(d_x), .gate = tensor_of(d_gate)};
  result.bias = tensor_of(d_bias);
  return result;
}

}  // namespace switchyard::testing
