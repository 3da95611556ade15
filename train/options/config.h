// What a training run is told: sizes, optimizer, ranks, data, files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::train {

// Tokens are bytes.
constexpr std::int64_t kVocabulary = 256;

// What keeps experts evenly loaded.
enum class Balance {
  bias,  // loss-free: a bias of the choice, moved after every step
  loss,  // Switch's auxiliary loss
  none,
};

enum class BufferSizing {
  exact,
  bounded,  // buffers of a fixed size; a step that overflows them is run again
};

struct ModelConfig {
  int layers = 4;
  std::int64_t hidden = 128;   // H
  std::int64_t heads = 4;      // of hidden / heads dimensions each, an even number
  std::int64_t context = 256;  // tokens of a sequence
  int experts = 8;
  std::int64_t top_k = 2;
  std::int64_t intermediate = 256;        // of one expert
  std::int64_t shared_intermediate = 0;   // 0: no shared expert
  int moe_every = 1;                      // layers n − 1, 2n − 1, … have experts
  std::int64_t dense_intermediate = 512;  // of the layers that have none
  bool tied = true;                       // the head is the embedding's matrix

  Balance balance = Balance::bias;
  float balance_rate = 1e-2F;    // of Balance::bias
  float balance_weight = 1e-2F;  // of Balance::loss
  float z_weight = 0.0F;         // of the router's z-loss; 0: none
  BufferSizing sizing = BufferSizing::exact;

  bool has_experts(int layer) const { return (layer + 1) % moe_every == 0; }
  std::int64_t head_size() const { return hidden / heads; }
};

struct OptimizerConfig {
  float learning_rate = 3e-3F;        // at its highest
  float final_learning_rate = 3e-4F;  // at the end of the cosine
  std::int64_t warm_up = 20;          // steps
  float beta1 = 0.9F;
  float beta2 = 0.95F;
  float epsilon = 1e-8F;
  float weight_decay = 0.1F;  // of matrices
  float clip = 1.0F;          // of the norm over all parameters; 0: none
};

// Sizes of the mesh's axes, outermost first; ep 0: what ranks leave.
struct MeshConfig {
  int ranks = 0;  // in all; 0: as many as there are
  int dp = 1;
  int ep = 0;
  int sp = 1;
  std::vector<std::string> expert_axes = {"ep"};  // or {"ep", "sp"}: that experts are divided over
};

struct DataConfig {
  std::string corpus;          // a file or folder; empty: the text of this project
  std::int64_t batch = 16;     // sequences a step, over all ranks
  std::int64_t held_out = 64;  // sequences of held-out text that are evaluated, at most
};

struct TrainConfig {
  ModelConfig model;
  OptimizerConfig optimizer;
  MeshConfig mesh;
  DataConfig data;
  std::int64_t steps = 400;
  std::uint64_t seed = 1;
  int threads = 0;  // of each rank; 0: cores / ranks
  std::int64_t evaluate_every =
      50;  // steps; held-out loss is taken at the end anyway; 0: only then

  std::string save;         // folder of checkpoints; empty: none
  std::int64_t every = 50;  // steps between checkpoints
  std::int64_t keep = 3;    // checkpoints that stay
  std::string resume;       // a checkpoint, or a folder of them; empty: begin anew
  std::string report = "switchyard-report.html";  // empty: none

  std::string prompt = "// ";       // of the sample at the end
  std::int64_t sample_bytes = 400;  // 0: no sample
  float temperature = 0.7F;
  bool json = false;  // one line a step
};

}  // namespace switchyard::train
