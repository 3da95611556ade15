// A small model of MoE layers over a mesh, and a step of it.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "switchyard/moe_layer.h"
#include "switchyard/parallelize.h"

namespace switchyard::testing {

// This rank's part of a model: the layers of its stage of "pp", their experts divided. Each layer
// is x + moe(x); behind the last is a scale [H]. The same seeds everywhere. The mesh has axes pp,
// dp, ep and sp.
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

  // Options of all layers; the stages have the same number of them.
  MeshModel(Mesh& mesh, const GradientAxes& axes, const std::vector<MoeLayerOptions>& options);

  std::vector<MoeBlock*> moe_blocks();
  // One step of the loss ⟨scale · model(x), d_out⟩ + 0.5 · balance + 0.25 · z of the layers that
  // have these losses, with all gradients reduced.
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
  std::deque<Layer> layers_;  // stay where they are
  Tensor scale_, d_scale_, d_x_;
};

}  // namespace switchyard::testing
