// SPDX-License-Identifier: Apache-2.0
// One training run: a model, its optimizer, its data and its progress.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

#include "data/corpus.h"
#include "model/transformer.h"
#include "options/config.h"
#include "switchyard/load_balancer.h"
#include "switchyard/mesh.h"
#include "training/adamw.h"
#include "training/history.h"

namespace switchyard::train {

// The progress of a run. With the parameters and moments, it is all that the next step depends on.
struct Progress {
  std::int64_t step = 0;      // steps done
  std::int64_t position = 0;  // windows of the text drawn so far
};

// Bytes that ranks sent each other in training, summed over ranks.
struct MovedBytes {
  std::int64_t tokens = 0;     // rows of MoE layers, there and back
  std::int64_t gradients = 0;  // includes the few numbers that are summed with them
  std::int64_t sequences = 0;  // keys and values, and their gradients
};

// Every function is collective over the mesh's world. The mesh and the corpus must outlive this.
class Trainer {
 public:
  Trainer(const TrainConfig& config, Mesh& mesh, const Device& device, const Corpus& corpus);

  StepRecord step();
  double held_out_loss();
  double bigram_loss() const;
  // Returns the picks since the last call, [MoE layers][experts].
  std::vector<std::vector<std::int64_t>> take_load();

  const TrainConfig& config() const { return config_; }
  Mesh& mesh() { return mesh_; }
  Transformer& model() { return model_; }
  AdamW& optimizer() { return optimizer_; }
  // [MoE layers]; empty unless the balance is Balance::bias.
  std::vector<LoadBalancer>& balancers() { return balancers_; }
  Progress& progress() { return progress_; }
  History& history() { return history_; }
  const Corpus& corpus() const { return corpus_; }
  // Covers the steps made by this object, not those before a checkpoint; so does model().times().
  const MovedBytes& bytes() const { return bytes_; }
  std::int64_t steps_made() const { return steps_made_; }

 private:
  // Counters of this rank since it started.
  struct Meters {
    double products = 0.0;  // seconds
    double moe = 0.0;
    std::int64_t moe_bytes = 0;
    std::int64_t gradient_bytes = 0;
    std::int64_t sequence_bytes = 0;
  };
  Meters read_meters();
  // Returns the ranks that hold copies of this rank's experts.
  Communicator& copies_of_experts();

  TokenBatch next_batch();
  void update_parameters(StepRecord& record);
  double clip_scale(double norm) const;
  [[noreturn]] void throw_diverged() const;
  // Returns the balance of the worst layer.
  double balance_experts();
  void finish(StepRecord& record, double loss_share, const Meters& before,
              std::chrono::steady_clock::time_point begin);

  TrainConfig config_;
  Mesh& mesh_;
  const Corpus& corpus_;
  WindowOrder order_;
  std::vector<std::string_view> held_out_;
  Transformer model_;
  AdamW optimizer_;
  std::vector<LoadBalancer> balancers_;
  Progress progress_;
  History history_;
  std::vector<std::vector<std::int64_t>> load_;
  MovedBytes bytes_;
  std::int64_t steps_made_ = 0;
};

}  // namespace switchyard::train
