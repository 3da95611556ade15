// SPDX-License-Identifier: Apache-2.0
#include "support/finite_difference.h"

namespace switchyard::testing {
namespace {

// The truncation error is about step², the rounding error 1e-16 / step: both are far below f32
// precision.
constexpr double kStep = 1e-5;

}  // namespace

Doubles numeric_gradient(Doubles& values, const Loss& loss) {
  if (!values.is_given()) return {};
  Doubles gradient = zeros(values.shape);
  for (std::size_t i = 0; i < values.values.size(); ++i) {
    double& value = values.values[i];
    const double before = value;
    value = before + kStep;
    const double high = loss();
    value = before - kStep;
    const double low = loss();
    value = before;
    gradient.values[i] = (high - low) / (2.0 * kStep);
  }
  return gradient;
}

ReferenceExpert numeric_gradient(ReferenceExpert& e, const Loss& loss) {
  return {numeric_gradient(e.gate, loss),    numeric_gradient(e.up, loss),
          numeric_gradient(e.down, loss),    numeric_gradient(e.gate_bias, loss),
          numeric_gradient(e.up_bias, loss), numeric_gradient(e.down_bias, loss)};
}

ReferenceRouter numeric_gradient(ReferenceRouter& router, const Loss& loss) {
  return {numeric_gradient(router.gate, loss), numeric_gradient(router.gate_bias, loss)};
}

NumericLayerGradients numeric_gradients(const MoeLayerOptions& options, ReferenceWeights weights,
                                        Doubles x, const std::vector<std::int32_t>& expert_ids,
                                        const Doubles& d_y) {
  ReferenceRouting routing{expert_ids,
                           reference_replay(options.router, weights.router, x, expert_ids)};
  const Loss with_weights_fixed = [&] {
    return dot(reference_layer(options, weights, x, routing), d_y);
  };
  const Loss loss = [&] {
    const ReferenceRouting routed{expert_ids,
                                  reference_replay(options.router, weights.router, x, expert_ids)};
    return dot(reference_layer(options, weights, x, routed), d_y);
  };
  NumericLayerGradients result;
  result.d_weights = numeric_gradient(routing.weights, with_weights_fixed);
  result.d_x = numeric_gradient(x, loss);
  result.weights.router = numeric_gradient(weights.router, loss);
  result.weights.shared = numeric_gradient(weights.shared, with_weights_fixed);
  for (auto& expert : weights.experts) {
    result.weights.experts.push_back(numeric_gradient(expert, with_weights_fixed));
  }
  return result;
}

}  // namespace switchyard::testing
