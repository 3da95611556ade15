// SPDX-License-Identifier: Apache-2.0
#include "support/layer/layer_alone.h"

#include "support/compare.h"

namespace switchyard::testing {

MoeLayerOptions small_layer_options() {
  return {.hidden = 20, .intermediate = 12, .router = RouterOptions::mixtral(6, 2)};
}

MoeLayerOptions tiny_layer_options() {
  return {.hidden = 6, .intermediate = 4, .router = RouterOptions::mixtral(6, 2)};
}

MoeWeights tiny_layer_weights(const MoeLayerOptions& options, const ExpertPlacement& placement,
                              int rank) {
  Random random(4);
  return part_of(random_layer(random, options, Biases::none), placement, rank);
}

LayerAlone::LayerAlone(const MoeLayerOptions& options, Biases biases, const Device& device)
    : layer(*world, ExpertPlacement::contiguous(options.router.num_experts, 1), options, device) {
  Random random(4);
  weights = random_layer(random, options, biases);
}

LayerGradients backward(LayerAlone& alone, SavedForBackward& saved, const ConstTensorView& d_y) {
  const auto top_k = alone.layer.options().router.top_k;
  LayerGradients g{Tensor(d_y.shape(), d_y.dtype()), Tensor({d_y.rows(), top_k}, Dtype::f32),
                   gradients_for(alone.weights)};
  alone.layer.backward(alone.weights, saved, d_y,
                       {.d_x = g.d_x, .gradients = g.gradients, .d_weights = g.d_weights});
  return g;
}

void expect_same_bits(const LayerGradients& actual, const LayerGradients& expected) {
  EXPECT_TRUE(same_bits(actual.d_x, expected.d_x));
  EXPECT_TRUE(same_bits(actual.d_weights, expected.d_weights));
  const auto& a = actual.gradients;
  const auto& e = expected.gradients;
  EXPECT_TRUE(same_bits(a.router.gate, e.router.gate));
  EXPECT_TRUE(same_bits(a.router.gate_bias, e.router.gate_bias));
  for (std::size_t i = 0; i < e.experts.size(); ++i) expect_same_bits(a.experts[i], e.experts[i]);
  expect_same_bits(a.shared, e.shared);
}

}  // namespace switchyard::testing
