// SPDX-License-Identifier: Apache-2.0
// All parameters of a model on one rank, or the values kept for each: gradients, moments.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/attention.h"
#include "options/config.h"
#include "switchyard/mesh.h"
#include "switchyard/moe_layer.h"
#include "switchyard/parallelize.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// Returns the options of the MoE layers of a model.
MoeLayerOptions moe_options(const ModelConfig& config);

// One tensor of a set.
struct ParameterView {
  std::string name;   // as in checkpoints: "layers.0.attention.qkv"
  TensorView values;  // contiguous f32
  bool decays = false;
  int layer = -1;
  int expert = -1;  // id of the expert it belongs to; −1: the tensor is the same on every rank
};

// A model's tensors on this rank. All sets of a model have the same tensors in the same order:
// values, gradients and the optimizer's two moments are four sets.
class ParameterSet {
 public:
  struct Layer {
    TensorView attention_norm;  // [H]
    AttentionViews attention;
    TensorView feed_forward_norm;  // [H]
    ExpertViews dense = {};        // only in a layer without experts
    int moe = -1;                  // index in moe_blocks(), or −1
  };

  // Makes a set of zeros in which no tensor is divided over ranks.
  explicit ParameterSet(const ModelConfig& config);
  // Returns the values that training starts from, made whole and then divided over the mesh. The
  // values of a tensor depend on its name and the seed alone. Collective over the mesh's world.
  static ParameterSet random(const ModelConfig& config, std::uint64_t seed, Mesh& mesh,
                             const std::vector<std::string>& expert_axes);
  // Returns a set of zeros with the same tensors.
  ParameterSet like() const;

  TensorView embedding() const { return embedding_; }    // [V, H]
  TensorView head() const { return head_; }              // [V, H]; tied: the embedding
  TensorView final_norm() const { return final_norm_; }  // [H]
  const std::vector<Layer>& layers() const { return layers_; }
  std::vector<MoeBlock>& blocks() { return blocks_; }
  const std::vector<MoeBlock>& blocks() const { return blocks_; }
  std::vector<MoeBlock*> moe_blocks();

  // All tensors that are whole on every rank, except those of MoE layers, as one block of memory
  // [n].
  TensorView dense() { return dense_; }
  // Returns every trained tensor; of the experts, those on this rank.
  std::vector<ParameterView> views();

 private:
  // Divides experts as `divided` does; null: not at all.
  ParameterSet(const ModelConfig& config, const std::vector<MoeBlock>* divided);

  TensorView take(std::int64_t& offset, const Shape& shape);
  void lay_out();

  ModelConfig config_;
  Tensor dense_;
  TensorView embedding_;
  TensorView head_;
  TensorView final_norm_;
  std::vector<Layer> layers_;
  std::vector<MoeBlock> blocks_;
};

}  // namespace switchyard::train
