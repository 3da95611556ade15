// One training run: a model, its optimizer, its data and where it has got to.
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

// Where a run has got to: with the parameters and moments, all that its next step depends on.
struct Progress {
  std::int64_t step = 0;      // steps done
  std::int64_t position = 0;  // windows of the text drawn
};

// What ranks sent each other in training, over all of them.
struct MovedBytes {
  std::int64_t tokens = 0;     // rows of MoE layers, there and back
  std::int64_t gradients = 0;  // and the few numbers that are summed with them
  std::int64_t sequences = 0;  // keys and values, and their gradients
};

// Every function is collective over the mesh's world. The mesh and the corpus must outlive this.
class Trainer {
 public:
  Trainer(const TrainConfig& config, Mesh& mesh, const Device& device, const Corpus& corpus);

  StepRecord step();
  double held_out_loss();
  double bigram_loss() const;
  // [MoE layers][experts]: picks since this was last called.
  std::vector<std::vector<std::int64_t>> take_load();

  const TrainConfig& config() const { return config_; }
  Mesh& mesh() { return mesh_; }
  Transformer& model() { return model_; }
  AdamW& optimizer() { return optimizer_; }
  std::vector<LoadBalancer>& balancers() { return balancers_; }  // [MoE layers]; others: none
  Progress& progress() { return progress_; }
  History& history() { return history_; }
  const Corpus& corpus() const { return corpus_; }
  // Of the steps that were made here, not those before a checkpoint; so is model().times().
  const MovedBytes& bytes() const { return bytes_; }
  std::int64_t steps_made() const { return steps_made_; }

 private:
  // Of this rank, since it began.
  struct Meters {
    double products = 0.0;  // seconds
    double moe = 0.0;
    std::int64_t moe_bytes = 0;
    std::int64_t gradient_bytes = 0;
    std::int64_t sequence_bytes = 0;
  };
  Meters read_meters();
  // The ranks that hold copies of this one's experts.
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
