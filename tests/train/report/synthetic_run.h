// SPDX-License-Identifier: Apache-2.0
// A run as it might have been, for its report.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "training/history.h"

namespace switchyard::testing {

struct RunSizes {
  std::int64_t steps = 400;
  std::int64_t load_every = 1;
  int layers = 4;
  int experts = 8;
};

inline train::LoadRecord synthetic_load(const RunSizes& sizes, std::int64_t step,
                                        std::mt19937& random) {
  std::normal_distribution<double> noise;
  const double t = static_cast<double>(step) / static_cast<double>(sizes.steps);
  train::LoadRecord record{.step = step, .picks = {}};
  for (int l = 0; l < sizes.layers; ++l) {
    auto& picks = record.picks.emplace_back();
    for (int e = 0; e < sizes.experts; ++e) {
      const double skew = 1.1 * std::sin(e * 2.3 + l * 1.7) * std::exp(-6.0 * t);
      picks.push_back(std::lround(1000.0 * std::exp(skew + 0.06 * noise(random))));
    }
  }
  return record;
}

inline train::StepRecord synthetic_step(const RunSizes& sizes, std::int64_t step,
                                        std::mt19937& random) {
  std::normal_distribution<double> noise;
  const double t = static_cast<double>(step) / static_cast<double>(sizes.steps);
  train::StepRecord record;
  record.step = step;
  record.loss = 1.6 + 3.9 * std::exp(-14.0 * t) + 0.03 * noise(random);
  record.learning_rate = static_cast<float>(3e-3 * std::min(20.0 * t, 1.0 - 0.9 * t));
  record.gradient_norm = 0.4 + 3.0 * std::exp(-20.0 * t);
  record.seconds = 0.295;
  record.tokens_per_second = 4096.0 / record.seconds * (1.0 + 0.02 * noise(random));
  record.balance = 1.15 + 0.9 * std::exp(-8.0 * t);
  record.gemm_share = 0.64;
  record.moe_seconds = 0.121;
  record.moe_gflops = 47.2;
  return record;
}

inline train::RunSummary synthetic_run(const RunSizes& sizes = {}) {
  std::mt19937 random(1);
  train::RunSummary run;
  run.title = "4 ranks: ep 4";
  run.state = train::RunState::completed;
  run.planned_steps = sizes.steps;
  run.origin = {.began = 1'795'000'000,
                .written = 1'795'000'121,
                .hosts = "node1 (2 ranks), node2 (2 ranks)",
                .processor = "A CPU, 8 hardware threads",
                .version = "1.2.3",
                .commit = "0123abcd",
                .command_line = "switchyard train --prompt '// '",
                .text = "some text",
                .training_bytes = 900'000,
                .held_out_bytes = 100'000,
                .peak_bytes = {300'000'000, 200'000'000}};
  run.ranks = {{.rows = 40'000, .waited_seconds = 2.0, .waited_for = 1},
               {.rows = 80'000, .waited_seconds = 0.0, .waited_for = 1}};
  for (std::int64_t step = 1; step <= sizes.steps; ++step) {
    run.history.steps.push_back(synthetic_step(sizes, step, random));
    if (step % 50 == 0) {
      run.history.held_out.push_back({step, run.history.steps.back().loss + 0.1});
    }
    if (step % sizes.load_every == 0) {
      run.history.loads.push_back(synthetic_load(sizes, step, random));
    }
  }
  for (int l = 0; l < sizes.layers; ++l) run.moe_layers.push_back(2 * l + 1);
  run.held_out_loss = 1.642;
  run.bigram_loss = 2.513;
  run.seconds = 121.0;
  run.measured_steps = sizes.steps;
  run.tokens = sizes.steps * 4096;
  run.parameters = 3'421'000;
  run.active_parameters = 1'214'000;
  run.stages = {{"attention", 28.0}, {"experts", 38.0}, {"optimizer", 7.0}};
  run.bytes = {{"rows to experts", 6'710'000'000}, {"gradients", 2'080'000'000}};
  run.configuration = {{"layers", "4"}, {"experts", "8"}, {"corpus", ""}};
  run.prompt = "// ";
  run.sample = "The rows of a rank.\nint rows = 3;\n";
  return run;
}

}  // namespace switchyard::testing
