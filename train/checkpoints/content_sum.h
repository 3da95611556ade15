// SPDX-License-Identifier: Apache-2.0
// A checksum over all bytes of a model's tensors that does not depend on how they are divided over
// ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "checkpoints/checkpoint_sets.h"
#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// Returns a hash of a name and its bytes. It always changes if a single 8-byte word does, and
// almost surely if more do.
std::uint64_t content_hash(std::string_view name, std::span<const std::byte> bytes);

// A sum of content hashes. Rank 0 counts whole tensors, and the ranks of an expert's first copy
// count that expert, so everything counts once.
class ContentSum {
 public:
  explicit ContentSum(Communicator& world) : world_(world) {}

  // Adds a contiguous tensor that rank 0 holds in full.
  void add_whole(const std::string& name, const ConstTensorView& view);
  // Collective.
  void add(const NamedSet& named);
  // Returns the same sum on every rank. Collective.
  std::uint64_t total();

 private:
  void count(const std::string& name, const ConstTensorView& view);
  void count(const std::string& stem, const ExpertWeights& expert);
  void add_block(const std::string& prefix, const MoeBlock& block);
  bool is_of_first_copy(const MoeBlock& block) const;

  Communicator& world_;
  std::uint64_t sum_ = 0;
};

}  // namespace switchyard::train
