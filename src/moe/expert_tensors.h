// An expert's tensors, in one order everywhere.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "switchyard/experts.h"

namespace switchyard {

constexpr std::size_t kGate = 0;
constexpr std::size_t kUp = 1;
constexpr std::size_t kDown = 2;
constexpr std::size_t kGateBias = 3;
constexpr std::size_t kUpBias = 4;
constexpr std::size_t kDownBias = 5;
constexpr std::size_t kNumExpertTensors = 6;

// As messages call them.
constexpr std::array<std::string_view, kNumExpertTensors> kExpertTensors{
    "gate", "up", "down", "gate_bias", "up_bias", "down_bias"};

template <typename View>
std::array<View, kNumExpertTensors> tensors_of(const BasicExpertTensors<View>& e) {
  return {e.gate, e.up, e.down, e.gate_bias, e.up_bias, e.down_bias};
}

// To be written.
template <typename View>
std::array<View*, kNumExpertTensors> tensors_in(BasicExpertTensors<View>& e) {
  return {&e.gate, &e.up, &e.down, &e.gate_bias, &e.up_bias, &e.down_bias};
}

}  // namespace switchyard
