// All parameters of a model on one rank, or what is kept for each of them: gradients, moments.
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

// The layer that a config's MoE layers are made as.
MoeLayerOptions moe_options(const ModelConfig& config);

// One tensor of a set.
struct ParameterView {
  std::string name;   // as in checkpoints: "layers.0.attention.qkv"
  TensorView values;  // contiguous f32
  bool decays = false;
  int layer = -1;
  int expert = -1;  // the id of the expert that it belongs to; −1: the same on every rank
};

// A model's tensors on this rank. Sets of one model have the same tensors in the same order:
// values, gradients and an optimizer's moments are four sets.
class ParameterSet {
 public:
  struct Layer {
    TensorView attention_norm;  // [H]
    AttentionViews attention;
    TensorView feed_forward_norm;  // [H]
    ExpertViews dense = {};        // of a layer without experts
    int moe = -1;                  // index in moe_blocks(), or −1
  };

  // Zeros, whole: nothing is divided.
  explicit ParameterSet(const ModelConfig& config);
  // The values that training begins with, made whole and then divided over the mesh: an expert's,
  // like all others, depend on its name and the seed alone. Collective over the mesh's world.
  static ParameterSet random(const ModelConfig& config, std::uint64_t seed, Mesh& mesh,
                             const std::vector<std::string>& expert_axes);
  // Zeros for each of these.
  ParameterSet like() const;

  TensorView embedding() const { return embedding_; }    // [V, H]
  TensorView head() const { return head_; }              // [V, H]; tied: the embedding
  TensorView final_norm() const { return final_norm_; }  // [H]
  const std::vector<Layer>& layers() const { return layers_; }
  std::vector<MoeBlock>& blocks() { return blocks_; }
  const std::vector<MoeBlock>& blocks() const { return blocks_; }
  std::vector<MoeBlock*> moe_blocks();

  // All that every rank has whole, except what belongs to MoE layers: one piece of memory [n].
  TensorView dense() { return dense_; }
  // Every tensor that is trained; those of experts are this rank's.
  std::vector<ParameterView> views();

 private:
  // With experts divided as in those blocks; null: whole.
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
