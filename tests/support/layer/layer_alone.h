// SPDX-License-Identifier: Apache-2.0
// Small layers: on one rank with all weights, or divided over several.
#pragma once

#include <memory>

#include "support/layer/moe_tensors.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing {

// H = 20, I = 12, top 2 of 6 experts.
MoeLayerOptions small_layer_options();
// H = 6, I = 4, top 2 of 6 experts; and the weights that one rank holds.
MoeLayerOptions tiny_layer_options();
MoeWeights tiny_layer_weights(const MoeLayerOptions& options, const ExpertPlacement& placement,
                              int rank);

struct LayerAlone {
  explicit LayerAlone(const MoeLayerOptions& options, Biases biases = Biases::none,
                      const Device& device = {});

  std::unique_ptr<Communicator> world = connect();
  MoeLayer layer;
  MoeWeights weights;
};

struct LayerGradients {
  Tensor d_x, d_weights;
  MoeGradients gradients;
};
LayerGradients backward(LayerAlone& alone, SavedForBackward& saved, const ConstTensorView& d_y);
void expect_same_bits(const LayerGradients& actual, const LayerGradients& expected);

}  // namespace switchyard::testing
