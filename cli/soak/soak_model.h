// The layers of a case on one rank, and the steps that they make.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "soak/soak_case.h"
#include "switchyard/device.h"
#include "switchyard/moe_layer.h"

namespace switchyard::cli {

// A layer's input in one step: the global sequence of a group, or a rank's part of it; in the
// host's memory.
struct SoakInput {
  Tensor x, d_y;                       // [T, H]
  std::optional<Tensor> ids = {};      // [T, K]
  std::optional<Tensor> weights = {};  // [T, K]
  std::optional<Tensor> valid = {};    // [T]
};
SoakInput make_input(const SoakCase& c, int step, std::size_t layer, int group);
SoakInput slice_of(const SoakInput& whole, std::int64_t first, std::int64_t last);

// A layer's results of one step, in the host's memory.
struct SoakResult {
  Tensor y, d_x;     // [T, H]
  Tensor d_weights;  // [T, K]
  Tensor ids;        // [T, K] as routed
  Tensor slots;      // [T, K]
  RouterLosses losses = {};
  std::optional<MoeParameters> gradients = {};  // of the rank's experts
  PlanStatus status = {};
  bool is_refused = false;  // since rows found no room: check() said so
};

// Whether a layer is as it was drawn, or the plainest with the same results.
enum class Form { as_drawn, plain };

class SoakModel {
 public:
  // Collective.
  SoakModel(Communicator& comm, const SoakCase& c, Form form, const Device& device);

  // Collective: forward through all layers, then backward through all of them.
  std::vector<SoakResult> step(const std::vector<SoakInput>& inputs);
  // Collective: what forward of the first layer throws.
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

// All experts of a layer on one rank, in the host's memory.
MoeParameters whole_weights(const SoakCase& c, std::size_t layer);

}  // namespace switchyard::cli
