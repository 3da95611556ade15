// Small layers: on one rank with weights for it, or the parts for several.
#pragma once

#include <memory>

#include "support/layer/moe_tensors.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing {

// 20 hidden, 12 inside, two of six experts.
MoeLayerOptions small_layer_options();
// 6 hidden, 4 inside, two of six experts; and what a rank holds of its weights.
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
