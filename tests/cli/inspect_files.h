// SPDX-License-Identifier: Apache-2.0
// Checkpoints to inspect, and what is said of them.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/command.h"
#include "support/checkpoint/checkpoint_files.h"

namespace switchyard::testing {

// Layers first … last − 1 of `num_experts` experts, H = 8, I = 4, bf16.
inline FileTensors layers(int first, int last, int num_experts) {
  FileTensors tensors;
  for (int layer = first; layer < last; ++layer) {
    const auto mlp = "model.layers." + std::to_string(layer) + ".mlp.";
    tensors[mlp + "gate.weight"] = zeros("BF16", {num_experts, 8}, 2);
    for (int e = 0; e < num_experts; ++e) {
      const auto stem = mlp + "experts." + std::to_string(e) + ".";
      tensors[stem + "gate_proj.weight"] = zeros("BF16", {4, 8}, 2);
      tensors[stem + "up_proj.weight"] = zeros("BF16", {4, 8}, 2);
      tensors[stem + "down_proj.weight"] = zeros("BF16", {8, 4}, 2);
    }
  }
  return tensors;
}

inline FileTensors joined(FileTensors a, const FileTensors& b) {
  a.insert(b.begin(), b.end());
  return a;
}

// The lines that are about `what`: "tensor", "block", "rank", …
inline std::vector<nlohmann::json> about(const std::string& what, const Outcome& outcome) {
  std::vector<nlohmann::json> result;
  for (const auto& line : lines_of(outcome)) {
    if (line.contains(what)) result.push_back(line);
  }
  return result;
}

class InspectFiles : public CheckpointFiles {
 protected:
  std::string shell(const std::filesystem::path& path) const {
    return "inspect " + path.string() + " ";
  }

  // Returns the field `what` of all lines about it.
  std::vector<std::string> names(const std::string& what, const std::filesystem::path& path,
                                 const std::string& flags = "") const {
    std::vector<std::string> result;
    for (const auto& line : about(what, run(shell(path) + "--json " + flags))) {
      result.push_back(line.at(what));
    }
    return result;
  }
};

inline void expect_says(const Outcome& outcome, const std::vector<std::string>& texts) {
  for (const auto& text : texts) {
    EXPECT_NE(outcome.output.find(text), std::string::npos) << text << "\n" << outcome.output;
  }
}

}  // namespace switchyard::testing
