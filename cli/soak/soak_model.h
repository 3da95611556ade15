// SPDX-License-Identifier: Apache-2.0
// The layers of a case on one rank, and the steps that they run.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "soak/soak_case.h"
#include "switchyard/device.h"
#include "switchyard/moe_layer.h"

namespace switchyard::cli {

// The input of a layer in one step, in host memory: the global sequence of a group, or a rank's
// part of it.
struct SoakInput {
  Tensor x, d_y;                       // [T, H]
  std::optional<Tensor> ids = {};      // [T, K]
  std::optional<Tensor> weights = {};  // [T, K]
  std::optional<Tensor> valid = {};    // [T]
};
SoakInput make_input(const SoakCase& c, int step, std::size_t layer, int group);
SoakInput slice_of(const SoakInput& whole, std::int64_t first, std::int64_t last);

// The results of a layer in one step, in host memory.
struct SoakResult {
  Tensor y, d_x;     // [T, H]
  Tensor d_weights;  // [T, K]
  Tensor ids;        // [T, K] as routed
  Tensor slots;      // [T, K]
  RouterLosses losses = {};
  std::optional<MoeParameters> gradients = {};  // with those of the rank's own experts
  PlanStatus status = {};
  bool is_refused = false;  // true if check() threw because rows did not fit
};

// Whether a layer has the options that were drawn, or the plainest ones with the same results.
enum class Form { as_drawn, plain };

class SoakModel {
 public:
  // Collective.
  SoakModel(Communicator& comm, const SoakCase& c, Form form, const Device& device);

  // Collective. Runs forward through all layers, then backward through all of them.
  std::vector<SoakResult> step(const std::vector<SoakInput>& inputs);
  // Collective. Returns the message of the InvalidArgument that the first layer's forward throws,
  // or an empty string.
  std::string error_of_forward(const SoakInput& input);

  const ExpertPlacement& placement(std::size_t layer) const { return layers_[layer]->placement(); }

 private:
  struct Pass;

  std::vector<Pass> passes_for(const std::vector<SoakInput>& inputs) const;
  void run(std::vector<Pass>& passes);
  void collect(std::size_t layer, Pass& pass, SoakResult& result);
  MoeLayerOptions options_of(const SoakLayer& layer) const;

  Communicator& comm_;
  const SoakCase& case_;
  Form form_;
  Device device_;
  std::vector<std::unique_ptr<MoeLayer>> layers_;
  std::vector<MoeParameters> weights_;
};

// Returns all weights of a layer as one rank has them, in host memory.
MoeParameters whole_weights(const SoakCase& c, std::size_t layer);

}  // namespace switchyard::cli
