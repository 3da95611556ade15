// SPDX-License-Identifier: Apache-2.0
// One training step over a global sequence, to compare different numbers of ranks.
#pragma once

#include <map>
#include <optional>

#include "support/reference/cut.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing {

// The global sequence, with picks that send hundreds of rows to some experts and few to others.
struct LayerProblem {
  explicit LayerProblem(const MoeLayerOptions& layer_options);

  MoeLayerOptions options;
  std::int64_t num_tokens = 700;
  Tensor x, d_y, ids;
  std::optional<Tensor> weights = {}, valid = {};  // none: the router's weights, and no padding
};

struct LayerResults {
  Tensor y, d_x, d_weights;
  std::map<int, ExpertGradients> experts;  // by id
};

// The inputs of one rank's tokens.
struct StepInput {
  Tensor x, d_y, ids;
  std::optional<Tensor> weights = {}, valid = {};
};
StepInput input_of(const LayerProblem& problem, const Piece& piece);

// Runs one rank's step on the layer's device. Collective. The gradients follow the layer's
// communicator and options. Weights are in the device's memory, inputs and results in the host's.
LayerResults run_step(MoeLayer& layer, const MoeWeights& weights, const StepInput& in,
                      Biases biases, const Device& device = {});

// True if a rank's results, for its piece and its experts, equal those of the whole.
bool same_part(const LayerResults& part, const Piece& piece, const LayerResults& whole);

}  // namespace switchyard::testing
