// SPDX-License-Identifier: Apache-2.0
// Undivided MoE blocks, for tests that divide them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/moe_layer.h"
#include "switchyard/parallelize.h"

namespace switchyard::testing {

constexpr std::uint64_t kBlockSeed = 5;

inline MoeLayerOptions options_with(int num_experts) {
  return {.hidden = 8,
          .intermediate = 6,
          .router = RouterOptions::torchtitan(num_experts, 2),
          .shared_intermediate = 4};
}

inline MoeBlock block_of(int num_experts, const std::string& name = "layers.3.mlp") {
  const auto whole = ExpertPlacement::contiguous(num_experts, 1);
  return {name, MoeParameters::random(options_with(num_experts), whole, 0, kBlockSeed, Biases::all),
          whole};
}

inline int apply(MoeBlock& block, Mesh* mesh, const std::vector<std::string>& axes = {"ep"}) {
  const std::vector<MoeBlock*> blocks{&block};
  return apply_expert_parallel(blocks, mesh, axes);
}

}  // namespace switchyard::testing
