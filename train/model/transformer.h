// SPDX-License-Identifier: Apache-2.0
// A decoder-only transformer on bytes whose feed-forward layers are MoE layers: forward, loss and
// gradients, over the ranks of a mesh (dp, ep, sp).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "common/stage_times.h"
#include "data/batch.h"
#include "model/attention.h"
#include "model/compute.h"
#include "model/parameters.h"
#include "options/config.h"
#include "switchyard/mesh.h"
#include "switchyard/moe_layer.h"

namespace switchyard::train {

// The results of one training step on this rank, besides gradients.
struct ModelLosses {
  double cross_entropy = 0.0;  // this rank's share of the mean over the whole batch
  double balance = 0.0;        // mean over MoE layers; the same on every rank
  double z = 0.0;
  bool ran_again = false;  // bounded buffers overflowed
};

// Every function is collective over the mesh's world; a rank may have no tokens. The mesh must
// outlive the model.
class Transformer {
 public:
  Transformer(const ModelConfig& config, const MeshConfig& mesh_config, Mesh& mesh,
              const Device& device, std::uint64_t seed);
  ~Transformer();

  // Returns the logits [T, V] of this rank's tokens.
  Tensor logits(const TokenBatch& batch);
  // Returns this rank's share of the mean loss over the whole batch.
  double loss(const TokenBatch& batch);
  // Writes gradients(), which are this rank's own until reduce_gradients().
  ModelLosses loss_and_gradients(const TokenBatch& batch);
  // Sums gradients() over the mesh.
  void reduce_gradients();

  ParameterSet& values() { return values_; }
  ParameterSet& gradients() { return gradients_; }
  std::vector<MoeLayer*> moe_layers();  // in the order of values().blocks()
  Compute& compute() { return compute_; }
  Mesh& mesh() { return mesh_; }
  // Times by stage, in training only.
  const StageTimes& times() const { return times_; }
  // Times of the MoE layers in training only: "forward" and "backward".
  const StageTimes& moe_times() const { return moe_times_; }
  // Seconds in matrix products so far. MoE and dense layers count only in training.
  double product_seconds() const;
  std::int64_t moe_bytes() const { return moe_bytes_; }  // exchanged by this rank in MoE layers
  std::int64_t moe_rows() const { return moe_rows_; }    // received for this rank's experts
  // Seconds that this rank waited for each rank in MoE layers, by rank of their communicator. Empty
  // before the first step. This and the two counters above cover training only.
  const std::vector<double>& moe_waits() const { return moe_waits_; }
  void add_time(std::string_view stage, double seconds) { times_.add(stage, seconds); }
  const ModelConfig& config() const { return config_; }

 private:
  struct Saved;
  struct LayerSaved;
  enum class Keeping { nothing, for_backward };
  struct NormBackward {
    const Tensor& x;
    TensorView weight;
    const Tensor& rms;
    const Tensor& d_y;
    TensorView d_weight;
  };

  // Runs a step, and runs it again if bounded buffers overflowed. Returns whether it ran again.
  bool run(const std::function<void()>& step);
  Tensor forward(const TokenBatch& batch, Saved& saved, ModelLosses& losses);
  void backward(const TokenBatch& batch, Saved& saved, const Tensor& d_logits);

  Tensor embed_tokens(const TokenBatch& batch);
  void forward_layer(int layer, const TokenBatch& batch, Tensor& x, LayerSaved& saved,
                     Keeping keeping);
  Tensor experts_forward(int moe, LayerSaved& saved, Keeping keeping);
  Tensor dense_forward(const ExpertViews& tensors, LayerSaved& saved);
  Tensor head(Tensor x, Saved& saved);
  Tensor norm(const Tensor& x, const TensorView& weight, Tensor& rms);

  Tensor head_backward(const Saved& saved, const Tensor& d_logits);
  void backward_layer(int layer, const TokenBatch& batch, LayerSaved& saved, Tensor& d_x);
  void experts_backward(int moe, LayerSaved& saved, const Tensor& d_y, Tensor& d_normed);
  void dense_backward(int layer, LayerSaved& saved, const Tensor& d_y, Tensor& d_normed);
  void norm_backward(const NormBackward& args, Tensor& d_x);

  ModelConfig config_;
  MeshConfig mesh_config_;
  Mesh& mesh_;
  Compute compute_;
  StageTimes times_;
  StageTimes moe_times_;
  std::int64_t moe_bytes_ = 0;
  std::int64_t moe_rows_ = 0;
  std::vector<double> moe_waits_;
  ParameterSet values_;
  ParameterSet gradients_;
  Attention attention_;
  Experts dense_;
  std::vector<MoeLayer> moe_;
};

}  // namespace switchyard::train
