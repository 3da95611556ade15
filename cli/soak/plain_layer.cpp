// SPDX-License-Identifier: Apache-2.0
#include "soak/plain_layer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

namespace switchyard::cli {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }
double gelu(double v) { return 0.5 * v * std::erfc(-v / std::numbers::sqrt2); }
double gelu_tanh(double v) {
  const double inside = std::sqrt(2.0 / std::numbers::pi) * (v + 0.044715 * v * v * v);
  return 0.5 * v * (1.0 + std::tanh(inside));
}

double activate(const ExpertsOptions& o, double gate, double up) {
  const double limit = o.clamp_limit;
  const double limited_up = std::clamp(up, -limit, limit);
  switch (o.activation) {
    case Activation::swiglu:
      return gate * sigmoid(gate) * up;
    case Activation::clamped_swiglu: {
      const double g = std::min(gate, limit);
      return g * sigmoid(o.gate_alpha * g) * (limited_up + o.up_offset);
    }
    case Activation::limited_swiglu:
      return std::min(gate * sigmoid(gate), limit) * limited_up;
    case Activation::geglu:
      return gelu(gate) * up;
    case Activation::geglu_tanh:
      return gelu_tanh(gate) * up;
    case Activation::reglu:
      return std::max(gate, 0.0) * up;
    case Activation::gelu:
      return gelu(up);
    case Activation::gelu_tanh:
      return gelu_tanh(up);
    case Activation::relu:
      return std::max(up, 0.0);
    case Activation::relu2:
      return std::max(up, 0.0) * std::max(up, 0.0);
    case Activation::silu:
      return up * sigmoid(up);
  }
  return 0.0;
}

// matrix · x [+ bias]
std::vector<double> project(const Doubles& matrix, const Doubles& bias,
                            const std::vector<double>& x) {
  std::vector<double> out = bias.values;
  out.resize(at(matrix.rows()));
  for (std::int64_t r = 0; r < matrix.rows(); ++r) {
    out[at(r)] = std::inner_product(x.begin(), x.end(), matrix.row(r), out[at(r)]);
  }
  return out;
}

// Adds weight · expert(x) to y, or expert(weight · x) if the weight stage is `input`.
void add_expert(const ExpertsOptions& o, const PlainExpert& expert, const double* x, double weight,
                double* y) {
  const bool weighs_input = o.weight_stage == WeightStage::input;
  std::vector<double> row(x, x + o.hidden);
  for (double& v : row) v *= weighs_input ? weight : 1.0;
  std::vector<double> inner = project(expert.up, expert.up_bias, row);
  std::vector<double> gate(inner.size());
  if (has_gate(o.activation)) gate = project(expert.gate, expert.gate_bias, row);
  for (std::size_t i = 0; i < inner.size(); ++i) inner[i] = activate(o, gate[i], inner[i]);
  const std::vector<double> out = project(expert.down, expert.down_bias, inner);
  for (std::size_t i = 0; i < out.size(); ++i) y[i] += (weighs_input ? 1.0 : weight) * out[i];
}

double log_sum_exp(const std::vector<double>& logits) {
  const double most = *std::ranges::max_element(logits);
  double sum = 0.0;
  for (const double v : logits) sum += std::exp(v - most);
  return most + std::log(sum);
}

std::vector<double> logits_of(const PlainStep& step, std::int64_t token) {
  const double* const x = step.x.row(token);
  return project(step.weights.router.gate, step.weights.router.gate_bias,
                 std::vector<double>(x, x + step.x.columns));
}

std::vector<double> scores_of(const RouterOptions& router, std::vector<double> logits) {
  const double total = log_sum_exp(logits);
  for (double& v : logits) {
    v = router.score == ScoreFunction::softmax ? std::exp(v - total) : sigmoid(v);
  }
  return logits;
}

// Returns the number of picks of each expert, over all tokens.
std::vector<double> picks_of(const PlainStep& step) {
  std::vector<double> picks(at(step.options.router.num_experts));
  for (const auto id : step.ids) {
    if (id >= 0) picks[at(id)] += 1.0;
  }
  return picks;
}

// Returns the output scale of each expert for GradientScale::global, or all 1 if it is off.
std::vector<double> output_scales(const PlainStep& step) {
  std::vector<double> scales = picks_of(step);
  const double mean =
      std::accumulate(scales.begin(), scales.end(), 0.0) / static_cast<double>(scales.size());
  for (double& s : scales) {
    s = step.options.gradient_scale == GradientScale::off || s == 0.0 ? 1.0 : mean / s;
  }
  return scales;
}

// Returns the routing weights of a token's K picks.
std::vector<double> weights_of(const PlainStep& step, const std::vector<double>& scores,
                               std::int64_t token) {
  const RouterOptions& router = step.options.router;
  const std::int32_t* const ids = step.ids.data() + token * router.top_k;
  std::vector<double> weights(at(router.top_k));
  double chosen = 1e-20;
  for (std::int64_t k = 0; k < router.top_k; ++k) chosen += ids[k] < 0 ? 0.0 : scores[at(ids[k])];
  for (std::int64_t k = 0; k < router.top_k; ++k) {
    if (ids[k] < 0) continue;
    weights[at(k)] = step.given_weights.is_given()
                         ? step.given_weights.row(token)[k]
                         : router.scale * scores[at(ids[k])] /
                               (router.normalise == Normalise::chosen ? chosen : 1.0);
    if (step.added_weights.is_given()) weights[at(k)] += step.added_weights.row(token)[k];
  }
  return weights;
}

}  // namespace

Doubles doubles_of(const ConstTensorView& view) {
  if (view.data() == nullptr) return {};
  Doubles result{.columns = view.shape().row_elements()};
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    const ConstTensorView row = view.slice(r, r + 1);
    if (view.dtype() == Dtype::bf16) {
      for (const auto v : row.span<Bfloat16>()) result.values.push_back(to_float(v));
    } else {
      for (const auto v : row.span<float>()) result.values.push_back(v);
    }
  }
  return result;
}

namespace {

PlainExpert plain_expert(const ExpertWeights& e) {
  return {doubles_of(e.gate),      doubles_of(e.up),      doubles_of(e.down),
          doubles_of(e.gate_bias), doubles_of(e.up_bias), doubles_of(e.down_bias)};
}

}  // namespace

PlainWeights doubles_of(const MoeWeights& weights) {
  PlainWeights result{.router = {.gate = doubles_of(weights.router.gate),
                                 .gate_bias = doubles_of(weights.router.gate_bias)},
                      .shared = plain_expert(weights.shared)};
  for (const auto& expert : weights.experts) result.experts.push_back(plain_expert(expert));
  return result;
}

std::vector<Doubles*> tensors_of(PlainWeights& weights) {
  std::vector<Doubles*> tensors{&weights.router.gate, &weights.router.gate_bias};
  const auto add = [&](PlainExpert& e) {
    for (Doubles* tensor : {&e.gate, &e.up, &e.down, &e.gate_bias, &e.up_bias, &e.down_bias}) {
      tensors.push_back(tensor);
    }
  };
  for (auto& expert : weights.experts) add(expert);
  add(weights.shared);
  return tensors;
}

PlainResult compute(const PlainStep& step) {
  const MoeLayerOptions& o = step.options;
  const auto top_k = o.router.top_k;
  const auto picks = picks_of(step);
  const auto scales = output_scales(step);
  const auto num_valid = static_cast<double>(std::ranges::count(step.is_valid, true));
  const bool has_losses = o.losses.balance != BalanceLoss::none || o.losses.z;
  PlainResult result{
      .y = {.columns = o.hidden, .values = std::vector<double>(step.x.values.size())}};
  for (std::int64_t t = 0; t < step.x.rows(); ++t) {
    if (!step.is_valid[at(t)]) continue;
    std::vector<double> logits;
    std::vector<double> scores(picks.size());
    if (has_losses || !step.given_weights.is_given()) {
      logits = logits_of(step, t);
      scores = scores_of(o.router, logits);
    }
    const auto weights = weights_of(step, scores, t);
    for (std::int64_t k = 0; k < top_k; ++k) {
      const auto id = step.ids[at(t * top_k + k)];
      if (id < 0 || !step.is_kept[at(t * top_k + k)]) continue;
      add_expert(o.experts(), step.weights.experts[at(id)], step.x.row(t),
                 weights[at(k)] * scales[at(id)], result.y.row(t));
    }
    if (o.shared_intermediate > 0) {
      add_expert(o.shared_expert(), step.weights.shared, step.x.row(t), 1.0, result.y.row(t));
    }
    if (o.losses.z) result.z += std::pow(log_sum_exp(logits), 2) / num_valid;
    if (o.losses.balance == BalanceLoss::none) continue;
    const double total = o.losses.scores == LossScores::shares
                             ? std::accumulate(scores.begin(), scores.end(), 0.0)
                             : 1.0;
    for (std::size_t e = 0; e < scores.size(); ++e) {
      result.balance += static_cast<double>(scores.size()) * picks[e] /
                        (num_valid * static_cast<double>(top_k)) * scores[e] / total / num_valid;
    }
  }
  // Padding adds nothing to the loss: its rows of y are 0.
  result.loss = std::inner_product(result.y.values.begin(), result.y.values.end(),
                                   step.d_y.values.begin(), 0.0) +
                step.d_losses.balance * result.balance + step.d_losses.z * result.z;
  return result;
}

double worst_choice(const PlainStep& step) {
  const auto top_k = step.options.router.top_k;
  double worst = -1.0;
  for (std::int64_t t = 0; t < step.x.rows(); ++t) {
    if (!step.is_valid[at(t)]) continue;
    auto others = scores_of(step.options.router, logits_of(step, t));
    double least = 1.0;
    for (std::int64_t k = 0; k < top_k; ++k) {
      double& score = others[at(step.ids[at(t * top_k + k)])];
      least = std::min(least, std::exchange(score, -1.0));
    }
    worst = std::max(worst, *std::ranges::max_element(others) - least);
  }
  return worst;
}

}  // namespace switchyard::cli
