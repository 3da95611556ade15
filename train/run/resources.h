// What a run will ask of the machine, known before it begins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "options/config.h"

namespace switchyard::train {

// How a run is spread: the ranks of its mesh, and those of them that share this machine's memory.
struct Spread {
  int ranks = 1;
  int ranks_here = 1;
  int texts_here = 1;  // copies of the text: one a process
};

// Bytes, about: a little less than a run takes at its peak, so that what can be is not refused.
struct MemoryNeed {
  std::int64_t parameters = 0;  // with gradients and moments, or whole before they are divided
  std::int64_t step = 0;        // what a step keeps for its backward
  std::int64_t text = 0;
  std::int64_t between_ranks = 0;  // what ranks gather from each other

  std::int64_t total() const;
};
// The mesh must fit the ranks.
MemoryNeed memory_of_training(const TrainConfig& config, const Spread& spread,
                              std::int64_t text_bytes);
// Of a text of so many tokens.
MemoryNeed memory_of_sampling(const ModelConfig& config, const Spread& spread, std::int64_t tokens);

// Bytes that this process can still get: what the system says, swap included, and what its control
// groups leave. The largest number where the system does not say. `root` is where its files begin.
std::int64_t available_memory(const std::filesystem::path& root = "/");

// Unsupported says what is needed, what it is for, and what is available.
void require_memory(const MemoryNeed& need, std::int64_t available, std::string_view who);

// Ranks that get no token of a batch and own no expert. The mesh must fit the ranks.
int num_idle_ranks(const TrainConfig& config, int num_ranks);

}  // namespace switchyard::train
