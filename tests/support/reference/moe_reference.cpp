// SPDX-License-Identifier: Apache-2.0
#include "support/reference/moe_reference.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "support/reference/reference.h"

namespace switchyard::testing {
namespace {

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }

double gelu(double v) { return 0.5 * v * std::erfc(-v / std::numbers::sqrt2); }

double gelu_tanh(double v) {
  const double inside = std::sqrt(2.0 / std::numbers::pi) * (v + 0.044715 * v * v * v);
  return 0.5 * v * (1.0 + std::tanh(inside));
}

// matrix · x [+ bias]
std::vector<double> project(const Doubles& matrix, const Doubles& bias,
                            const std::vector<double>& x) {
  std::vector<double> out(at(matrix.rows()));
  for (std::int64_t o = 0; o < matrix.rows(); ++o) {
    const double* row = matrix.row(o);
    double sum = bias.is_given() ? bias.values[at(o)] : 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += row[i] * x[i];
    out[at(o)] = sum;
  }
  return out;
}

double activate(const ExpertsOptions& options, double gate, double up) {
  const double limit = options.clamp_limit;
  switch (options.activation) {
    case Activation::swiglu:
      return gate * sigmoid(gate) * up;
    case Activation::clamped_swiglu: {
      const double g = std::min(gate, limit);
      const double offset = options.up_offset;
      return g * sigmoid(options.gate_alpha * g) * (std::clamp(up, -limit, limit) + offset);
    }
    case Activation::limited_swiglu:
      return std::min(gate * sigmoid(gate), limit) * std::clamp(up, -limit, limit);
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

std::vector<double> scores_of(const RouterOptions& options, const ReferenceRouter& router,
                              const Doubles& x, std::int64_t token) {
  const std::vector<double> row(x.row(token), x.row(token) + x.shape[1]);
  std::vector<double> scores = project(router.gate, router.gate_bias, row);
  for (std::size_t e = 0; e < scores.size(); ++e) {
    if (options.score_bias == ScoreBias::logits && router.score_bias.is_given()) {
      scores[e] += router.score_bias.values[e];
    }
  }
  const double most = *std::ranges::max_element(scores);
  double total = 0.0;
  for (double& s : scores) {
    s = options.score == ScoreFunction::softmax ? std::exp(s - most) : sigmoid(s);
    total += s;
  }
  if (options.score == ScoreFunction::softmax) {
    for (double& s : scores) s /= total;
  }
  return scores;
}

// Returns the ids of the n largest values, largest first. Ties go to the lower id.
std::vector<std::int32_t> best(const std::vector<double>& values, std::int64_t n) {
  std::vector<std::int32_t> ids(values.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids, [&](auto a, auto b) { return values[at(a)] > values[at(b)]; });
  ids.resize(at(n));
  return ids;
}

std::vector<std::int32_t> choose(const RouterOptions& options, const ReferenceRouter& router,
                                 std::vector<double> scores, std::int64_t token) {
  if (options.choice == Choice::balanced) {
    std::vector<std::int32_t> ids;
    for (std::int64_t k = 0; k < options.top_k; ++k) {
      ids.push_back(static_cast<std::int32_t>((token * options.top_k + k) % options.num_experts));
    }
    return ids;
  }
  if (options.score_bias == ScoreBias::choice && router.score_bias.is_given()) {
    for (std::size_t e = 0; e < scores.size(); ++e) scores[e] += router.score_bias.values[e];
  }
  const auto size = at(options.num_experts / options.num_expert_groups);
  std::vector<double> group_scores;
  for (std::size_t first = 0; first < scores.size(); first += size) {
    std::vector<double> group(scores.begin() + static_cast<std::ptrdiff_t>(first),
                              scores.begin() + static_cast<std::ptrdiff_t>(first + size));
    std::ranges::sort(group, std::greater<>());
    group_scores.push_back(size > 1 ? group[0] + group[1] : group[0]);
  }
  const auto kept = best(group_scores, options.kept_expert_groups);
  for (std::size_t e = 0; e < scores.size(); ++e) {
    if (std::ranges::find(kept, static_cast<std::int32_t>(e / size)) == kept.end()) {
      scores[e] = -INFINITY;
    }
  }
  return best(scores, options.top_k);
}

void weigh(const RouterOptions& options, const std::vector<double>& scores, const std::int32_t* ids,
           double* weights) {
  double total = 0.0;
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    if (ids[k] >= 0) total += scores[at(ids[k])];
  }
  const double divisor = options.normalise == Normalise::chosen ? total + 1e-20 : 1.0;
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    weights[k] = ids[k] < 0 ? 0.0 : options.scale * scores[at(ids[k])] / divisor;
  }
}

void add(double* to, const std::vector<double>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
}

}  // namespace

Doubles zeros(const Shape& shape) { return {shape, std::vector<double>(at(shape.num_elements()))}; }

Doubles doubles_of(const ConstTensorView& view) {
  if (view.data() == nullptr) return {};
  Doubles result = zeros(view.shape());
  double* to = result.values.data();
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    for (std::int64_t i = 0; i < view.shape().row_elements(); ++i) {
      *to++ = view.dtype() == Dtype::f32
                  ? reinterpret_cast<const float*>(view.row(r))[i]
                  : to_float(reinterpret_cast<const Bfloat16*>(view.row(r))[i]);
    }
  }
  return result;
}

Tensor tensor_of(const Doubles& doubles) {
  Tensor result(doubles.shape, Dtype::f32);
  std::ranges::transform(doubles.values, result.span<float>().begin(),
                         [](double v) { return static_cast<float>(v); });
  return result;
}

double dot(const Doubles& a, const Doubles& b) {
  return std::inner_product(a.values.begin(), a.values.end(), b.values.begin(), 0.0);
}

ReferenceRouter doubles_of(const RouterWeights& w) {
  return {doubles_of(w.gate), doubles_of(w.gate_bias), doubles_of(w.score_bias)};
}

ReferenceExpert doubles_of(const ExpertWeights& w) {
  return {doubles_of(w.gate),      doubles_of(w.up),      doubles_of(w.down),
          doubles_of(w.gate_bias), doubles_of(w.up_bias), doubles_of(w.down_bias)};
}

ReferenceWeights doubles_of(const MoeWeights& weights) {
  ReferenceWeights result{.router = doubles_of(weights.router),
                          .shared = doubles_of(weights.shared)};
  for (const auto& expert : weights.experts) result.experts.push_back(doubles_of(expert));
  return result;
}

ReferenceRouting reference_route(const RouterOptions& options, const ReferenceRouter& router,
                                 const Doubles& x) {
  ReferenceRouting routing{.weights = zeros({x.rows(), options.top_k})};
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const auto scores = scores_of(options, router, x, t);
    const auto ids = choose(options, router, scores, t);
    weigh(options, scores, ids.data(), routing.weights.row(t));
    routing.expert_ids.insert(routing.expert_ids.end(), ids.begin(), ids.end());
  }
  return routing;
}

Doubles reference_replay(const RouterOptions& options, const ReferenceRouter& router,
                         const Doubles& x, const std::vector<std::int32_t>& expert_ids) {
  Doubles weights = zeros({x.rows(), options.top_k});
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    weigh(options, scores_of(options, router, x, t), expert_ids.data() + t * options.top_k,
          weights.row(t));
  }
  return weights;
}

std::vector<double> reference_expert(const ExpertsOptions& options, const ReferenceExpert& expert,
                                     const double* x, double weight) {
  const bool weigh_input = options.weight_stage == WeightStage::input;
  std::vector<double> row(x, x + options.hidden);
  for (double& v : row) v *= weigh_input ? weight : 1.0;
  std::vector<double> inner = project(expert.up, expert.up_bias, row);
  std::vector<double> gate(inner.size());
  if (has_gate(options.activation)) gate = project(expert.gate, expert.gate_bias, row);
  for (std::size_t i = 0; i < inner.size(); ++i) inner[i] = activate(options, gate[i], inner[i]);
  std::vector<double> out = project(expert.down, expert.down_bias, inner);
  for (double& v : out) v *= weigh_input ? 1.0 : weight;
  return out;
}

Doubles reference_layer(const MoeLayerOptions& options, const ReferenceWeights& weights,
                        const Doubles& x, const ReferenceRouting& routing) {
  const auto top_k = options.router.top_k;
  Doubles y = zeros(x.shape);
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    for (std::int64_t k = 0; k < top_k; ++k) {
      const auto id = routing.expert_ids[at(t * top_k + k)];
      if (id < 0) continue;
      add(y.row(t), reference_expert(options.experts(), weights.experts[at(id)], x.row(t),
                                     routing.weights.row(t)[k]));
    }
    if (options.shared_intermediate > 0) {
      add(y.row(t), reference_expert(options.shared_expert(), weights.shared, x.row(t), 1.0));
    }
  }
  return y;
}

}  // namespace switchyard::testing
