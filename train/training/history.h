// What a run was like, for its report and for other tools.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/stage_times.h"

namespace switchyard::train {

// The steps after the record before it, up to `step`: one, or several in a long run. Values are
// over all ranks, and means over the steps where there are several.
struct StepRecord {
  std::int64_t step = 0;  // counted from 1
  double loss = 0.0;      // cross-entropy, nats a byte
  double balance_loss = 0.0;
  double z_loss = 0.0;
  float learning_rate = 0.0F;
  double gradient_norm = 0.0;
  double seconds = 0.0;
  double tokens_per_second = 0.0;
  double balance = 1.0;          // rows of the fullest expert / mean, the worst layer
  double gemm_share = 0.0;       // of the ranks' time
  double moe_seconds = 0.0;      // in MoE layers, mean over ranks
  double moe_gflops = 0.0;       // that the experts' products of all ranks reach in that time
  std::int64_t bytes_moved = 0;  // that ranks sent each other
  std::int64_t ran_again = 0;    // steps whose bounded buffers overflowed
};

struct HeldOutRecord {
  std::int64_t step = 0;
  double loss = 0.0;
};

// How many picks each expert got between the record before and this one.
struct LoadRecord {
  std::int64_t step = 0;                         // the last that is counted
  std::vector<std::vector<std::int64_t>> picks;  // [MoE layers][experts]
};

// A bounded record of a run of any length. When a list is full, its neighbours are merged in pairs:
// of two held-out losses the later one stays, and picks are added.
struct History {
  static constexpr std::size_t kMostSteps = 8192;
  static constexpr std::size_t kMostHeldOut = 8192;
  static constexpr std::size_t kMostLoads = 1024;

  std::vector<StepRecord> steps;
  std::vector<HeldOutRecord> held_out;
  std::vector<LoadRecord> loads;

  void add(const StepRecord& record);
  void add(const HeldOutRecord& record);
  void add(const LoadRecord& record);

  std::int64_t num_steps() const;
  double seconds() const;  // of all steps
  // Calls visit(record, the number of its steps as a double).
  template <typename Visit>
  void for_each_step_record(Visit visit) const {
    std::int64_t before = 0;
    for (const StepRecord& record : steps) {
      visit(record, static_cast<double>(record.step - before));
      before = record.step;
    }
  }
};

// All that a report shows.
struct RunSummary {
  std::string title;  // "4 ranks (threads): dp 1 x ep 4 x sp 1"
  std::vector<std::pair<std::string, std::string>> configuration;  // in order
  std::vector<int> moe_layers;                                     // which layers have experts
  History history;
  double held_out_loss = 0.0;
  double bigram_loss = 0.0;
  double seconds = 0.0;                // of the whole run
  std::int64_t tokens = 0;             // trained on
  std::int64_t parameters = 0;         // of the whole model
  std::int64_t active_parameters = 0;  // that one token uses
  // The steps that the following are about: of a run that was resumed, those since then.
  std::int64_t measured_steps = 0;
  std::vector<StageTime> stages;                            // mean over ranks, of all steps
  std::vector<std::pair<std::string, std::int64_t>> bytes;  // by what they were, over all ranks
  std::string prompt;
  std::string sample;  // follows the prompt
};

}  // namespace switchyard::train
