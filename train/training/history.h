// SPDX-License-Identifier: Apache-2.0
// The record of a run, for its report and for other tools.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/stage_times.h"
#include "training/run_origin.h"

namespace switchyard::train {

// The steps after the record before it, up to `step`: one, or several in a long run. Values are
// over all ranks, and means over the steps where there are several.
struct StepRecord {
  std::int64_t step = 0;  // counted from 1
  double loss = 0.0;      // cross-entropy, nats per byte
  double balance_loss = 0.0;
  double z_loss = 0.0;
  float learning_rate = 0.0F;
  double gradient_norm = 0.0;
  double seconds = 0.0;
  double tokens_per_second = 0.0;
  double balance = 1.0;          // rows of the fullest expert / mean, in the worst layer
  double gemm_share = 0.0;       // share of the ranks' time spent in matrix products
  double moe_seconds = 0.0;      // spent in MoE layers, mean over ranks
  double moe_gflops = 0.0;       // rate of the experts' products of all ranks in that time
  std::int64_t bytes_moved = 0;  // sent between ranks
  std::int64_t ran_again = 0;    // steps whose bounded buffers overflowed
};

struct HeldOutRecord {
  std::int64_t step = 0;
  double loss = 0.0;
};

// The number of picks of each expert since the previous record.
struct LoadRecord {
  std::int64_t step = 0;                         // the last step counted
  std::vector<std::vector<std::int64_t>> picks;  // [MoE layers][experts]
};

// A continuation of the run from a checkpoint.
struct ResumeRecord {
  std::int64_t step = 0;  // the last step of the checkpoint
  std::int64_t time = 0;  // seconds since 1970
};

// A bounded record of a run of any length. When a list is full, its neighbours are merged in pairs:
// of two held-out losses or resumes the later one stays, and picks are added.
struct History {
  static constexpr std::size_t kMostSteps = 8192;
  static constexpr std::size_t kMostHeldOut = 8192;
  static constexpr std::size_t kMostLoads = 1024;
  static constexpr std::size_t kMostResumes = 64;

  std::vector<StepRecord> steps;
  std::vector<HeldOutRecord> held_out;
  std::vector<LoadRecord> loads;
  std::vector<ResumeRecord> resumes;

  void add(const StepRecord& record);
  void add(const HeldOutRecord& record);
  void add(const LoadRecord& record);
  void add(const ResumeRecord& record);

  std::int64_t num_steps() const;
  double seconds() const;  // total time of all steps
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

enum class RunState {
  running,  // or killed since the report was written
  stopped,  // by a signal
  completed,
};

// Everything that a report shows.
struct RunSummary {
  std::string title;  // "4 ranks (threads): dp 1 x ep 4 x sp 1"
  RunState state = RunState::running;
  RunOrigin origin;
  std::int64_t planned_steps = 0;
  std::vector<std::pair<std::string, std::string>> configuration;  // in order
  std::vector<int> moe_layers;                                     // layers that have experts
  History history;
  double held_out_loss = 0.0;
  double bigram_loss = 0.0;
  double seconds = 0.0;                // the whole run
  std::int64_t tokens = 0;             // trained on
  std::int64_t parameters = 0;         // the whole model
  std::int64_t active_parameters = 0;  // used by one token
  // The number of steps that the fields below cover: in a resumed run, those since it was resumed.
  std::int64_t measured_steps = 0;
  std::vector<StageTime> stages;                            // mean over ranks, all steps together
  std::vector<std::pair<std::string, std::int64_t>> bytes;  // by kind, over all ranks
  std::vector<RankUse> ranks;                               // empty without MoE layers
  std::string prompt;
  std::string sample;  // follows the prompt
};

}  // namespace switchyard::train
