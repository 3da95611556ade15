// SPDX-License-Identifier: Apache-2.0
// Runs small enough for tests.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "data/corpus.h"
#include "options/config.h"
#include "switchyard/mesh.h"
#include "training/trainer.h"

namespace switchyard::testing {

inline train::TrainConfig tiny_config() {
  train::TrainConfig config;
  config.model = {.layers = 2,
                  .hidden = 16,
                  .heads = 2,
                  .context = 10,
                  .experts = 6,
                  .top_k = 2,
                  .intermediate = 12,
                  .dense_intermediate = 20};
  config.data.batch = 5;
  config.data.held_out = 7;
  config.steps = 20;
  config.optimizer.warm_up = 3;
  config.optimizer.learning_rate = 1e-2F;
  config.optimizer.final_learning_rate = 1e-3F;
  return config;
}

// Text that can be learned: words in an order that repeats with changes.
inline const train::Corpus& tiny_corpus() {
  static const train::Corpus corpus("words", [] {
    const std::vector<std::string> words{"switch ", "yard ", "token ", "expert\n", "rank ", "row "};
    std::string text;
    for (std::size_t i = 0; text.size() < 20000; ++i) text += words[(i + i / 7) % words.size()];
    return text;
  }());
  return corpus;
}

// dp x ep x sp.
struct MeshSizes {
  int dp = 1;
  int ep = 1;
  int sp = 1;
  std::vector<std::string> expert_axes = {"ep"};

  int ranks() const { return dp * ep * sp; }
  std::string name() const {
    return "dp" + std::to_string(dp) + "ep" + std::to_string(ep) + "sp" + std::to_string(sp) +
           (expert_axes.size() > 1 ? "flat" : "");
  }
  std::vector<MeshAxis> axes() const { return {{"dp", dp}, {"ep", ep}, {"sp", sp}}; }
  train::MeshConfig config() const {
    return {.dp = dp, .ep = ep, .sp = sp, .expert_axes = expert_axes};
  }
};

inline void PrintTo(const MeshSizes& sizes, std::ostream* out) {  // for GoogleTest
  *out << sizes.name();
}

}  // namespace switchyard::testing
