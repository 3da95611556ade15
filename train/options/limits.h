// SPDX-License-Identifier: Apache-2.0
// The largest values of options. They also apply to the options stored in a checkpoint.
#pragma once

#include <cstdint>

namespace switchyard::train {

constexpr std::int64_t kMostSteps = 1'000'000'000;
constexpr std::int64_t kLongest = 1 << 20;  // length of a sequence or sample, size of a batch
constexpr int kMostRanks = 65536;

}  // namespace switchyard::train
