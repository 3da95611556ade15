// Weights, or gradients, of an MoE layer: views of anybody's memory, and memory of one's own.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "switchyard/device.h"
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
using MoeViews = BasicMoeTensors<TensorView>;  // to be read and written
using MoeGradients = MoeViews;                 // which receive gradients

enum class Biases { none, all };  // all: of the gate and of the routed experts

// One rank's part of a layer, in the memory of a device: its weights, or their gradients. Owns
// packed memory, in which the tensors of one kind of all experts lie one after the other; or has a
// share in that of others. Views share the ownership.
class SWITCHYARD_API MoeParameters {
 public:
  // Zeros.
  MoeParameters(const MoeLayerOptions& options, const ExpertPlacement& placement, int rank,
                Biases biases = Biases::none, const Device& device = {});
  // Evenly distributed in ±1/√fan-in; an expert's values depend on its id and the seed alone.
  static MoeParameters random(const MoeLayerOptions& options, const ExpertPlacement& placement,
                              int rank, std::uint64_t seed, Biases biases = Biases::none,
                              const Device& device = {});

  // Views of anybody's memory, which is the device's; whoever owns it stays the owner.
  static MoeParameters of(MoeViews tensors, const Device& device = {});

  // The same values in packed memory of a device; one of the two is the CPU, or they are the same.
  // Waits for them to be there.
  MoeParameters copy_on(const Device& device) const;

  // To be read; valid as long as this is.
  const MoeWeights& weights() const& { return weights_; }
  MoeWeights weights() && { return std::move(weights_); }
  // To be read and written; valid as long as this is.
  const MoeViews& views() & { return views_; }
  MoeViews views() && { return std::move(views_); }
  void set_zero();
  // The device whose memory holds the parameters.
  const Device& device() const { return device_; }

 private:
  MoeParameters(MoeViews views, Device device);

  MoeViews views_;
  MoeWeights weights_;  // of the same memory
  Device device_;
};

}  // namespace switchyard
