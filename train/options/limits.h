// The largest values of options, which what a checkpoint says of its run keeps to as well.
#pragma once

#include <cstdint>

namespace switchyard::train {

constexpr std::int64_t kMostSteps = 1'000'000'000;
constexpr std::int64_t kLongest = 1 << 20;  // of a sequence, a batch, a sample
constexpr int kMostRanks = 65536;

}  // namespace switchyard::train
