// SPDX-License-Identifier: Apache-2.0
#include "support/layer/moe_tensors.h"

#include <cmath>

#include "support/compare.h"

namespace switchyard::testing {
namespace {

ConstTensorView random_matrix(Random& random, const Shape& shape, Dtype dtype,
                              std::int64_t fan_in) {
  Tensor result = random.tensor(shape, dtype);
  const float bound = 1.0F / std::sqrt(static_cast<float>(fan_in));
  if (dtype == Dtype::f32) {
    for (float& v : result.span<float>()) v *= bound;
  } else {
    for (Bfloat16& v : result.span<Bfloat16>()) v = to_bfloat16(bound * to_float(v));
  }
  return result.view();
}

TensorView gradient_for(const ConstTensorView& weight, GradientDtype dtype) {
  if (weight.data() == nullptr) return {};
  Tensor result(weight.shape(), dtype == GradientDtype::f32 ? Dtype::f32 : weight.dtype());
  poison(result);
  return result.view();
}

}  // namespace

ExpertWeights random_expert(Random& random, const ExpertsOptions& options, Biases biases) {
  const auto [hidden, inner, dtype] =
      std::tuple(options.hidden, options.intermediate, options.dtype);
  const bool gated = has_gate(options.activation);
  ExpertWeights e;
  if (gated) e.gate = random_matrix(random, {inner, hidden}, dtype, hidden);
  e.up = random_matrix(random, {inner, hidden}, dtype, hidden);
  e.down = random_matrix(random, {hidden, inner}, dtype, inner);
  if (biases == Biases::none) return e;
  if (gated) e.gate_bias = random_matrix(random, {inner}, dtype, 1);
  e.up_bias = random_matrix(random, {inner}, dtype, 1);
  e.down_bias = random_matrix(random, {hidden}, dtype, 1);
  return e;
}

MoeWeights random_layer(Random& random, const MoeLayerOptions& options, Biases biases) {
  const std::int64_t num_experts = options.router.num_experts;
  MoeWeights weights;
  weights.router.gate = random_matrix(random, {num_experts, options.hidden}, options.dtype, 1);
  if (biases == Biases::all) {
    weights.router.gate_bias = random_matrix(random, {num_experts}, options.dtype, 1);
  }
  if (options.router.score_bias != ScoreBias::none) {
    weights.router.score_bias = random_matrix(random, {num_experts}, Dtype::f32, 4);
  }
  for (int e = 0; e < options.router.num_experts; ++e) {
    weights.experts.push_back(random_expert(random, options.experts(), biases));
  }
  if (options.shared_intermediate > 0) {
    weights.shared = random_expert(random, options.shared_expert(), biases);
  }
  return weights;
}

MoeWeights part_of(const MoeWeights& weights, const ExpertPlacement& placement, int rank) {
  MoeWeights part{.router = weights.router, .shared = weights.shared};
  for (const auto e : placement.experts_of(rank)) {
    part.experts.push_back(weights.experts[static_cast<std::size_t>(e)]);
  }
  return part;
}

ExpertGradients gradients_for(const ExpertWeights& w, GradientDtype dtype) {
  return {gradient_for(w.gate, dtype),    gradient_for(w.up, dtype),
          gradient_for(w.down, dtype),    gradient_for(w.gate_bias, dtype),
          gradient_for(w.up_bias, dtype), gradient_for(w.down_bias, dtype)};
}

MoeGradients gradients_for(const MoeWeights& weights) {
  MoeGradients result;
  result.router.gate = gradient_for(weights.router.gate, GradientDtype::as_weights);
  result.router.gate_bias = gradient_for(weights.router.gate_bias, GradientDtype::as_weights);
  for (const auto& expert : weights.experts) result.experts.push_back(gradients_for(expert));
  result.shared = gradients_for(weights.shared);
  return result;
}

void expect_near(const ExpertGradients& actual, const ReferenceExpert& expected, double tolerance) {
  const auto actual_tensors = named_tensors(actual);
  const auto expected_tensors = named_tensors(expected);
  for (std::size_t i = 0; i < actual_tensors.size(); ++i) {
    const auto& [name, tensor] = actual_tensors[i];
    ASSERT_EQ(tensor.data() != nullptr, expected_tensors[i].second.is_given()) << name;
    if (tensor.data() == nullptr) continue;
    EXPECT_TRUE(near(tensor, tensor_of(expected_tensors[i].second), tolerance)) << name;
  }
}

}  // namespace switchyard::testing
