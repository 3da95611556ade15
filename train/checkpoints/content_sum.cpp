// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/content_sum.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

namespace switchyard::train {
namespace {

// Every operation is invertible, so a change in one word always changes the hash.
std::uint64_t absorb(std::uint64_t hash, std::uint64_t word) {
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15U;
  const std::uint64_t product = (hash ^ word) * kFactor;
  return product ^ (product >> 29);  // otherwise the highest bits would never mix into lower ones
}

std::uint64_t absorb_all(std::uint64_t hash, std::span<const std::byte> bytes) {
  hash = absorb(hash, bytes.size());
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  std::uint64_t word = 0;
  for (; bytes.size() >= kWord; bytes = bytes.subspan(kWord)) {
    std::memcpy(&word, bytes.data(), kWord);
    hash = absorb(hash, word);
  }
  word = 0;
  if (!bytes.empty()) std::memcpy(&word, bytes.data(), bytes.size());
  return absorb(hash, word);
}

}  // namespace

std::uint64_t content_hash(std::string_view name, std::span<const std::byte> bytes) {
  return absorb(absorb_all(absorb_all(0, std::as_bytes(std::span(name))), bytes), 0);
}

void ContentSum::add_whole(const std::string& name, const ConstTensorView& view) {
  if (world_.rank() == 0) count(name, view);
}

void ContentSum::add(const NamedSet& named) {
  for (const auto& [name, view] : dense_tensors(named)) add_whole(name, view);
  for (const auto& block : named.set.blocks()) add_block(prefix_of(named, block), block);
}

std::uint64_t ContentSum::total() {
  auto sum = std::bit_cast<std::int64_t>(sum_);
  world_.all_reduce(TensorView(&sum, {1}));
  return std::bit_cast<std::uint64_t>(sum);
}

void ContentSum::count(const std::string& name, const ConstTensorView& view) {
  sum_ += content_hash(name, {view.data(), static_cast<std::size_t>(view.bytes())});
}

void ContentSum::count(const std::string& stem, const ExpertWeights& expert) {
  count(stem + "gate", expert.gate);
  count(stem + "up", expert.up);
  count(stem + "down", expert.down);
}

void ContentSum::add_block(const std::string& prefix, const MoeBlock& block) {
  const MoeWeights& tensors = block.parameters.weights();
  if (world_.rank() == 0) {
    count(prefix + "gate", tensors.router.gate);
    count(prefix + "score_bias", tensors.router.score_bias);
    count(prefix + "shared.", tensors.shared);
  }
  if (!is_of_first_copy(block)) return;
  const auto ids = block.placement.experts_of(block.rank());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    count(fmt::format("{}experts.{}.", prefix, ids[i]), tensors.experts[i]);
  }
}

// True if the block's communicator contains rank 0 of the world.
bool ContentSum::is_of_first_copy(const MoeBlock& block) const {
  std::int64_t first_rank = world_.rank();
  if (block.comm != nullptr) block.comm->broadcast(TensorView(&first_rank, {1}), 0);
  return first_rank == 0;
}

}  // namespace switchyard::train
