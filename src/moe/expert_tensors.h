// SPDX-License-Identifier: Apache-2.0
// The tensors of an expert, in a fixed order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "core/check_memory.h"
#include "core/given.h"
#include "switchyard/experts.h"
#include "switchyard/moe_parameters.h"

namespace switchyard {

constexpr std::size_t kGate = 0;
constexpr std::size_t kUp = 1;
constexpr std::size_t kDown = 2;
constexpr std::size_t kGateBias = 3;
constexpr std::size_t kUpBias = 4;
constexpr std::size_t kDownBias = 5;
constexpr std::size_t kNumExpertTensors = 6;

// The names used in messages.
constexpr std::array<std::string_view, kNumExpertTensors> kExpertTensors{
    "gate", "up", "down", "gate_bias", "up_bias", "down_bias"};

template <typename View>
std::array<View, kNumExpertTensors> tensors_of(const BasicExpertTensors<View>& e) {
  return {e.gate, e.up, e.down, e.gate_bias, e.up_bias, e.down_bias};
}

// Returns all tensors of a layer that this rank has.
template <typename View>
std::vector<View> given_tensors(const BasicMoeTensors<View>& layer) {
  std::vector<View> result;
  const auto add = [&](const View& view) {
    if (is_given(view)) result.push_back(view);
  };
  for (const auto& view : {layer.router.gate, layer.router.gate_bias, layer.router.score_bias}) {
    add(view);
  }
  for (const auto& expert : layer.experts) std::ranges::for_each(tensors_of(expert), add);
  std::ranges::for_each(tensors_of(layer.shared), add);
  return result;
}

// Returns pointers to the tensors, for writing.
template <typename View>
std::array<View*, kNumExpertTensors> tensors_in(BasicExpertTensors<View>& e) {
  return {&e.gate, &e.up, &e.down, &e.gate_bias, &e.up_bias, &e.down_bias};
}

}  // namespace switchyard
