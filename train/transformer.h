// A decoder-only transformer on bytes whose feed-forward layers are MoE layers: forward, loss and
// gradients, over the ranks of a mesh (dp, ep, sp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "batch.h"
#include "compute.h"
#include "config.h"
#include "parameters.h"
#include "stage_times.h"
#include "switchyard/mesh.h"
#include "switchyard/moe_layer.h"

namespace switchyard::train {

// What one training step gave besides gradients; of this rank.
struct ModelLosses {
  double cross_entropy = 0.0;  // this rank's share of the mean over the whole batch
  double balance = 0.0;        // mean over MoE layers, the same on every rank
  double z = 0.0;
};

// Every function is collective over the mesh's world; a rank may have no tokens. The mesh must
// outlive the model.
class Transformer {
 public:
  Transformer(const ModelConfig& config, const MeshConfig& mesh_config, Mesh& mesh,
              const Device& device, std::uint64_t seed);
  ~Transformer();

  // Logits [T, V] of this rank's tokens.
  Tensor logits(const TokenBatch& batch);
  // This rank's share of the mean loss over the whole batch.
  double loss(const TokenBatch& batch);
  // Writes gradients(): this rank's own, until reduce_gradients().
  ModelLosses loss_and_gradients(const TokenBatch& batch);
  // Adds them up over the mesh.
  void reduce_gradients();

  ParameterSet& values() { return values_; }
  ParameterSet& gradients() { return gradients_; }
  std::vector<MoeLayer*> moe_layers();  // in the order of values().blocks()
  Compute& compute() { return compute_; }
  Mesh& mesh() { return mesh_; }
  StageTimes& times() { return times_; }
  const ModelConfig& config() const { return config_; }

 private:
  struct Saved;
  struct LayerSaved;

  Tensor embed_tokens(const TokenBatch& batch);
  void forward_layer(int layer, const TokenBatch& batch, Tensor& x, LayerSaved* saved);
  void feed_forward(int layer, const ConstTensorView& normed, const TensorView& x,
                    LayerSaved* saved);
  Tensor head(Tensor& x, Saved* saved);
  void head_backward(const Saved& saved, const ConstTensorView& d_logits, const TensorView& d_x);
  void backward_layer(int layer, const TokenBatch& batch, LayerSaved& saved, Tensor& d_x);
  void feed_forward_backward(int layer, LayerSaved& saved, const ConstTensorView& d_y,
                             const TensorView& d_normed);

  ModelConfig config_;
  MeshConfig mesh_config_;
  Mesh& mesh_;
  Compute compute_;
  StageTimes times_;
  ParameterSet values_;
  ParameterSet gradients_;
  Attention attention_;
  Experts dense_;
  std::vector<MoeLayer> moe_;
};

}  // namespace switchyard::train
