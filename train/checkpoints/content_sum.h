// A number over all bytes of a model's tensors, the same however they are divided over ranks.
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

// Of named bytes: another number if one word of 8 bytes differs, whatever it holds, and almost
// surely so if more do.
std::uint64_t content_hash(std::string_view name, std::span<const std::byte> bytes);

// The sum of hashes. Whole tensors are counted by rank 0, and experts by the ranks of their first
// copy, so that everything counts once.
class ContentSum {
 public:
  explicit ContentSum(Communicator& world) : world_(world) {}

  // A contiguous tensor that rank 0 has whole.
  void add_whole(const std::string& name, const ConstTensorView& view);
  // Collective.
  void add(const NamedSet& named);
  // Collective, the same on every rank.
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
