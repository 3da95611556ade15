// SPDX-License-Identifier: Apache-2.0
// Weights or gradients of an MoE layer, as views of any memory or in memory of their own.
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

// The tensors of one rank's part of a layer. The router and the shared expert are the same on every
// rank; the experts are those that this rank owns, in ascending order of id.
template <typename View>
struct BasicMoeTensors {
  BasicRouterTensors<View> router = {};
  std::vector<BasicExpertTensors<View>> experts = {};
  BasicExpertTensors<View> shared = {};  // several shared experts are concatenated into one
};
// Views to be read.
using MoeWeights = BasicMoeTensors<ConstTensorView>;
using MoeViews = BasicMoeTensors<TensorView>;  // to be read and written
using MoeGradients = MoeViews;                 // to receive gradients

// Which biases parameters have.
enum class Biases { none, all };  // all: of the gate and of the routed experts

// One rank's part of a layer in the memory of a device: its weights, or their gradients. Either
// owns packed memory, which holds the tensors of one kind of all experts one after the other, or
// shares the memory of others. Views share the ownership.
class SWITCHYARD_API MoeParameters {
 public:
  // Allocates zeros.
  MoeParameters(const MoeLayerOptions& options, const ExpertPlacement& placement, int rank,
                Biases biases = Biases::none, const Device& device = {});
  // Draws values uniformly between −1/√fan-in and 1/√fan-in. An expert's values depend only on its
  // id and the seed.
  static MoeParameters random(const MoeLayerOptions& options, const ExpertPlacement& placement,
                              int rank, std::uint64_t seed, Biases biases = Biases::none,
                              const Device& device = {});

  // Wraps views of the device's memory, whose ownership does not change. Throws InvalidArgument for
  // a view in other memory.
  static MoeParameters of(MoeViews tensors, const Device& device = {});

  // Returns a copy in packed memory of `device`. Waits if either device is the CPU. Throws
  // Unsupported unless one of the two is a CPU or they are the same device.
  MoeParameters copy_on(const Device& device) const;

  // Views to be read, valid as long as this object.
  const MoeWeights& weights() const& { return weights_; }
  MoeWeights weights() && { return std::move(weights_); }
  // Views to be read and written, valid as long as this object.
  const MoeViews& views() & { return views_; }
  MoeViews views() && { return std::move(views_); }
  void set_zero();
  // The device whose memory holds the parameters.
  const Device& device() const { return device_; }

 private:
  MoeParameters(MoeViews views, Device device);

  MoeViews views_;
  MoeWeights weights_;  // views of the same memory
  Device device_;
};

}  // namespace switchyard
