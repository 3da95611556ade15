// SPDX-License-Identifier: Apache-2.0
// Shared memory, and the mbarriers in it.
#include <fmt/format.h>

#include <map>
#include <string>

#include "emulation/machine.h"

namespace emulation {
namespace {

std::size_t rounded_up(std::size_t bytes) { return (bytes + 127) / 128 * 128; }

// Static variables lie behind the dynamic memory, whose size is known from the launch.
std::size_t begin_of_variables(const Block& block) {
  return kFirstAddress + rounded_up(block.machine->launch.shared_bytes);
}
std::size_t end_of_shared(const Block& block) {
  return begin_of_variables(block) + block.static_bytes;
}

}  // namespace

Block& block_of(std::uint32_t address) {
  Block& mine = *self().block;
  const std::uint32_t rank = address >> 24;
  if (rank == 0) return mine;
  if (rank > mine.cluster->blocks.size()) fail("an address in a block that is not in the cluster");
  Block& block = *mine.cluster->blocks[rank - 1];
  if (block.alive == 0) fail("an access to the shared memory of a block that has ended");
  return block;
}

std::byte* shared_at(std::uint32_t address, std::size_t bytes) {
  return shared_in(block_of(address), address & 0xFFFFFF, bytes);
}

std::byte* shared_in(const Block& block, std::uint32_t offset, std::size_t bytes) {
  if (offset < kFirstAddress || offset + bytes > end_of_shared(block)) {
    fail(fmt::format("address {} is outside of the shared memory of its block", offset));
  }
  if (bytes > 1 && bytes <= 16 && offset % bytes != 0) {
    fail(fmt::format("address {} is misaligned for {} bytes", offset, bytes));
  }
  return block.shared + offset;
}

std::uint32_t shared_address_of(const void* pointer) {
  const Block& block = *self().block;
  const auto offset = static_cast<const std::byte*>(pointer) - block.shared;
  if (offset < kFirstAddress || offset > static_cast<std::ptrdiff_t>(end_of_shared(block))) {
    fail("a pointer that is not into shared memory");
  }
  return static_cast<std::uint32_t>(offset);
}

std::byte* static_variable(const void* tag, std::size_t bytes) {
  Block& block = *self().block;
  const auto [found, is_new] = block.variables.try_emplace(tag, block.static_bytes);
  if (is_new) block.static_bytes += rounded_up(bytes);
  const Launch& launch = block.machine->launch;
  if (launch.shared_bytes + block.static_bytes > launch.most_shared) {
    fail(fmt::format("{} bytes of shared memory with static variables, more than {}",
                     launch.shared_bytes + block.static_bytes, launch.most_shared));
  }
  return block.shared + begin_of_variables(block) + found->second;
}

std::byte* dynamic_memory() { return self().block->shared + kFirstAddress; }

namespace {

// What shared memory holds where a barrier is.
constexpr std::uint64_t kBarrierMark = 0xBA221E2BA221E2;

Barrier& barrier_at(Block& block, std::uint32_t offset) {
  if (block.alive == 0) fail("an access to a barrier of a block that has ended");
  const auto found = block.barriers.find(offset);
  if (found == block.barriers.end()) fail(fmt::format("there is no barrier at {}", offset));
  if (std::memcmp(block.shared + offset, &kBarrierMark, sizeof(kBarrierMark)) != 0) {
    fail(fmt::format("the barrier at {} was overwritten", offset));
  }
  return found->second;
}

void complete_if_due(Block& block, Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1U;
  barrier.pending = barrier.arrivals;
  ++block.machine->progress;
}

}  // namespace

void init_barrier(std::uint32_t address, int arrivals) {
  std::memcpy(shared_at(address, sizeof(kBarrierMark)), &kBarrierMark, sizeof(kBarrierMark));
  self().block->barriers[address] = {.arrivals = arrivals, .pending = arrivals};
}

void arrive(Block& block, std::uint32_t offset, int bytes_expected) {
  Barrier& barrier = barrier_at(block, offset);
  barrier.bytes += bytes_expected;
  if (barrier.pending == 0) {
    fail(fmt::format("the barrier at {} got more arrivals than the {} that it expects", offset,
                     barrier.arrivals));
  }
  --barrier.pending;
  complete_if_due(block, barrier);
}

void complete_bytes(Block& block, std::uint32_t offset, int bytes) {
  Barrier& barrier = barrier_at(block, offset);
  barrier.bytes -= bytes;
  complete_if_due(block, barrier);
}

void wait_for_phase(std::uint32_t address, unsigned parity) {
  Block& block = *self().block;
  static thread_local std::map<std::uint32_t, std::string> names;
  auto& name = names[address];
  if (name.empty()) name = fmt::format("the barrier at {}", address);
  wait_until(name.c_str(),
             [&block, address, parity] { return barrier_at(block, address).phase != parity; });
}

}  // namespace emulation
