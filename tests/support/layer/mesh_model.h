// SPDX-License-Identifier: Apache-2.0
// A small model of MoE layers over a mesh, and one training step of it.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "switchyard/moe_layer.h"
#include "switchyard/parallelize.h"

namespace switchyard::testing {

// This rank's part of a model: the layers of its "pp" stage, with their experts divided. Each layer
// computes x + moe(x); a scale [H] follows the last. Seeds are the same on every rank. The mesh has
// the axes pp, dp, ep and sp.
class MeshModel {
 public:
  struct Layer {
    Layer(int layer_id, const MoeLayerOptions& layer_options);

    int id;
    MoeLayerOptions options;
    MoeBlock block;
    std::optional<MoeLayer> layer = {};
    std::optional<MoeParameters> gradients = {};
    Tensor x = {};
    SavedForBackward saved = {};
    RouterLosses losses = {};
  };

  // `options` has an entry per layer. All stages have the same number of layers.
  MeshModel(Mesh& mesh, const GradientAxes& axes, const std::vector<MoeLayerOptions>& options);

  std::vector<MoeBlock*> moe_blocks();
  // Runs one step with the loss ⟨scale · model(x), d_out⟩ + 0.5 · balance + 0.25 · z, where the
  // last two apply to layers that have these losses. Reduces all gradients.
  void step(const Tensor& x, const Tensor& d_out);

  const std::deque<Layer>& layers() const { return layers_; }
  const Tensor& d_scale() const { return d_scale_; }
  const Tensor& d_x() const { return d_x_; }

 private:
  Tensor forward(Tensor value);
  Tensor backward(Tensor d_value);
  Tensor scale_backward(const Tensor& value, const Tensor& d_out);

  Mesh& mesh_;
  GradientAxes axes_;
  std::deque<Layer> layers_;  // a deque, so that addresses stay valid
  Tensor scale_, d_scale_, d_x_;
};

}  // namespace switchyard::testing
