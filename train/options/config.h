// SPDX-License-Identifier: Apache-2.0
// The configuration of a training run: sizes, optimizer, ranks, data, files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::train {

// Tokens are bytes.
constexpr std::int64_t kVocabulary = 256;

// The method that keeps experts evenly loaded.
enum class Balance {
  bias,  // loss-free: a bias on expert selection, updated after every step
  loss,  // the auxiliary loss of Switch Transformer
  none,
};

enum class BufferSizing {
  exact,
  bounded,  // buffers of a fixed size; a step that overflows them runs again
};

struct ModelConfig {
  int layers = 4;
  std::int64_t hidden = 128;   // H
  std::int64_t heads = 4;      // each of hidden / heads dimensions, an even number
  std::int64_t context = 256;  // tokens per sequence
  int experts = 8;
  std::int64_t top_k = 2;
  std::int64_t intermediate = 256;        // inner size of an expert
  std::int64_t shared_intermediate = 0;   // 0: no shared expert
  int moe_every = 1;                      // layers n − 1, 2n − 1, … have experts
  std::int64_t dense_intermediate = 512;  // inner size of layers without experts
  bool tied = true;                       // the head shares the embedding's matrix

  Balance balance = Balance::bias;
  float balance_rate = 1e-2F;    // for Balance::bias
  float balance_weight = 1e-2F;  // for Balance::loss
  float z_weight = 0.0F;         // for the router's z-loss; 0: none
  BufferSizing sizing = BufferSizing::exact;

  bool has_experts(int layer) const { return (layer + 1) % moe_every == 0; }
  std::int64_t head_size() const { return hidden / heads; }
};

struct OptimizerConfig {
  float learning_rate = 3e-3F;        // peak
  float final_learning_rate = 3e-4F;  // at the end of the cosine
  std::int64_t warm_up = 20;          // steps
  float beta1 = 0.9F;
  float beta2 = 0.95F;
  float epsilon = 1e-8F;
  float weight_decay = 0.1F;  // matrices only
  float clip = 1.0F;          // limit on the gradient norm over all parameters; 0: none
};

// Sizes of the mesh's axes, outermost first. With ep 0, ep takes the ranks that dp and sp leave.
struct MeshConfig {
  int ranks = 0;  // in total; 0: as many as there are
  int dp = 1;
  int ep = 0;
  int sp = 1;
  std::vector<std::string> expert_axes = {"ep"};  // axes that divide experts; or {"ep", "sp"}
};

struct DataConfig {
  std::string corpus;          // a file or folder; empty: the King James Bible
  std::int64_t batch = 16;     // sequences per step, over all ranks
  std::int64_t held_out = 64;  // maximum number of held-out sequences to evaluate
};

struct TrainConfig {
  ModelConfig model;
  OptimizerConfig optimizer;
  MeshConfig mesh;
  DataConfig data;
  std::int64_t steps = 400;
  std::uint64_t seed = 1;
  int threads = 0;  // per rank; 0: cores / ranks
  std::int64_t evaluate_every =
      50;  // steps; 0: only at the end, where the held-out loss is always taken

  std::string save;         // folder of checkpoints; empty: none
  std::int64_t every = 50;  // steps between checkpoints
  std::int64_t keep = 3;    // newest checkpoints that are kept
  std::string resume;       // a checkpoint, or a folder of them; empty: start anew
  std::string report = "switchyard-report.html";  // empty: none

  std::string prompt = "In the beginning";  // start of the sample at the end
  std::int64_t sample_bytes = 400;          // 0: no sample
  float temperature = 0.7F;
  bool json = false;  // print one line of JSON per step
};

}  // namespace switchyard::train
