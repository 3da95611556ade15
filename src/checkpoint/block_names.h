// SPDX-License-Identifier: Apache-2.0
// The names of an MoE block's tensors in a checkpoint, as from_hugging_face expects them.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/expert_tensors.h"
#include "switchyard/moe_parameters.h"

namespace switchyard {

template <typename View>
using NamedViews = std::vector<std::pair<std::string, View>>;

constexpr std::array<std::string_view, kNumExpertTensors> kExpertTensorNames{
    "gate_proj.weight", "up_proj.weight", "down_proj.weight",
    "gate_proj.bias",   "up_proj.bias",   "down_proj.bias"};

inline std::string expert_stem(std::string_view prefix, std::int64_t id) {
  return std::string(prefix) + "experts." + std::to_string(id) + ".";
}

template <typename View>
void append(NamedViews<View>& all, const std::string& stem, const BasicExpertTensors<View>& e) {
  const auto tensors = tensors_of(e);
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    all.emplace_back(stem + std::string(kExpertTensorNames[t]), tensors[t]);
  }
}

// Returns the tensors of a block that every rank holds, the router and the shared expert. Includes
// views that are not given.
template <typename View>
NamedViews<View> replicated_tensors(const std::string& prefix, const BasicMoeTensors<View>& block,
                                    std::string_view shared_stem = "shared_experts.") {
  NamedViews<View> all{{prefix + "gate.weight", block.router.gate},
                       {prefix + "gate.bias", block.router.gate_bias},
                       {prefix + "gate.e_score_correction_bias", block.router.score_bias}};
  append(all, prefix + std::string(shared_stem), block.shared);
  return all;
}

}  // namespace switchyard
