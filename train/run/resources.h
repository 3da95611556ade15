// SPDX-License-Identifier: Apache-2.0
// A run's memory: estimated before it starts, and measured.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "options/config.h"

namespace switchyard::train {

// The ranks of the mesh, and those of them that share this machine's memory.
struct Spread {
  int ranks = 1;
  int ranks_here = 1;
  int texts_here = 1;  // copies of the text: one per process
};

// Estimated bytes. Slightly less than a run's peak, so that no feasible run is refused.
struct MemoryNeed {
  std::int64_t parameters = 0;  // with gradients and moments, or whole before division
  std::int64_t step = 0;        // kept by a step for its backward pass
  std::int64_t text = 0;
  std::int64_t between_ranks = 0;  // gathered by ranks from each other

  std::int64_t total() const;
};
// The mesh must fit the ranks.
MemoryNeed memory_of_training(const TrainConfig& config, const Spread& spread,
                              std::int64_t text_bytes);
// Estimates the memory to sample from a text of `tokens` tokens.
MemoryNeed memory_of_sampling(const ModelConfig& config, const Spread& spread, std::int64_t tokens);

// Returns the bytes that this process can still allocate: what the system reports, including swap,
// limited by its control groups. Returns the largest int64 if the system does not say. `root` is
// the root of the file system to read.
std::int64_t available_memory(const std::filesystem::path& root = "/");

// Returns the most bytes of memory that this process has had resident, or 0 if the system does not
// say.
std::int64_t peak_memory(const std::filesystem::path& root = "/");

// Throws an Unsupported that says how much is needed, what for, and how much is available.
void require_memory(const MemoryNeed& need, std::int64_t available, std::string_view who);

// Returns the number of ranks that get no token of a batch and own no expert. The mesh must fit the
// ranks.
int num_idle_ranks(const TrainConfig& config, int num_ranks);

}  // namespace switchyard::train
