// Weights, or gradients, of an MoE layer: views of anybody's memory, and memory of one's own.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "switchyard/experts.h"
#include "switchyard/export.h"
#include "switchyard/placement.h"
#include "switchyard/router.h"

namespace switchyard {

struct MoeLayerOptions;

// The router and the shared expert are the same on every rank; the routed experts are this rank's,
// in ascending order of id.
template <typename View>
struct BasicMoeTensors {
  BasicRouterTensors<View> router = {};
  std::vector<BasicExpertTensors<View>> experts = {};
  BasicExpertTensors<View> shared = {};  // of the shared experts, side by side as one
};
using MoeWeights = BasicMoeTensors<ConstTensorView>;
using MoeGradients = BasicMoeTensors<TensorView>;

enum class Biases { none, all };  // all: of the gate and of the routed experts

// One rank's part of a layer: its weights, or their gradients. Owns packed memory, or has a share
// in that of others. Views share the ownership.
class SWITCHYARD_API MoeParameters {
 public:
  // Zeros.
  MoeParameters(const MoeLayerOptions& options, const ExpertPlacement& placement, int rank,
                Biases biases = Biases::none);
  // Evenly distributed in ±1/√fan-in; an expert's values depend on its id and the seed alone.
  static MoeParameters random(const MoeLayerOptions& options, const ExpertPlacement& placement,
                              int rank, std::uint64_t seed, Biases biases = Biases::none);

  // Views of anybody's memory; whoever owns it stays the owner.
  static MoeParameters of(MoeGradients tensors) { return MoeParameters(std::move(tensors)); }

  MoeWeights weights() const;                      // to be read
  MoeGradients views() const { return tensors_; }  // to be written
  void set_zero();

 private:
  explicit MoeParameters(MoeGradients tensors) : tensors_(std::move(tensors)) {}

  MoeGradients tensors_;
};

}  // namespace switchyard
