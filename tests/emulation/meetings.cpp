// SPDX-License-Identifier: Apache-2.0
// Threads that wait for each other: of a block, a cluster, a warp or a warpgroup.
#include <algorithm>
#include <bit>

#include "emulation/machine.h"

namespace emulation {

void sync_block(int number, int threads) {
  Block& block = *self().block;
  NamedBarrier& barrier = block.named[number];
  const unsigned generation = barrier.generation;
  const auto complete = [&] {
    if (barrier.generation != generation) return true;
    if (barrier.arrived < (threads == 0 ? block.alive : threads)) return false;
    barrier.arrived = 0;
    ++barrier.generation;
    ++block.machine->progress;
    return true;
  };
  if (threads != 0 && barrier.arrived >= threads) fail("too many threads at a barrier");
  ++barrier.arrived;
  wait_until("the threads of its block", complete);
}

int sync_block_and_count(bool vote) {
  Block& block = *self().block;
  const unsigned parity = block.named[0].generation / 2 % 2;  // every call syncs twice
  if (vote) ++block.votes[parity];
  sync_block(0, 0);
  const int count = block.votes[parity];
  sync_block(0, 0);
  block.votes[parity] = 0;
  return count;
}

void sync_cluster() {
  Machine& machine = *self().block->machine;
  Cluster& cluster = *self().block->cluster;
  NamedBarrier& barrier = cluster.barrier;
  const unsigned generation = barrier.generation;
  ++barrier.arrived;
  wait_until("the threads of its cluster", [&] {
    if (barrier.generation != generation) return true;
    int alive = 0;
    for (const auto& block : cluster.blocks) alive += block->alive;
    if (barrier.arrived < alive) return false;
    barrier.arrived = 0;
    ++barrier.generation;
    ++machine.progress;
    return true;
  });
}

namespace {

// `how_many()` threads must come.
template <typename HowMany>
void meet(Together& group, int number, int size, void* mine, const std::function<void(void**)>& act,
          const char* what, const HowMany& how_many) {
  if (group.operands.empty()) group.operands.assign(static_cast<std::size_t>(size), nullptr);
  if (group.operands[number] != nullptr) fail("a thread meets others twice at once");
  if (group.arrived == 0) group.action = &act.target_type();
  if (*group.action != act.target_type()) fail("threads that must meet call different functions");
  group.operands[number] = mine;
  ++group.arrived;
  const unsigned generation = group.generation;
  const auto is_complete = [&] {
    return group.generation != generation || group.arrived == how_many();
  };
  wait_until(what, is_complete);
  if (group.generation != generation) return;
  act(group.operands.data());
  std::ranges::fill(group.operands, nullptr);
  group.arrived = 0;
  ++group.generation;
  ++self().block->machine->progress;
}

}  // namespace

void meet_lanes(unsigned mask, void* mine, const std::function<void(void**)>& act) {
  const Thread& thread = self();
  Block& block = *thread.block;
  const int warp = thread.number / kWarpLanes;
  const int lane = thread.number % kWarpLanes;
  if ((mask >> lane & 1U) == 0) fail("a lane meets others with a mask that it is not in");
  Warp& own = block.warps[warp];
  meet(mask == ~0U ? own.all : own.some[mask], lane, kWarpLanes, mine, act, "the lanes of its warp",
       [&own, mask] { return std::popcount(mask & own.alive); });
}

Warpgroup& my_warpgroup() { return self().block->groups[self().number / kGroupThreads]; }

void meet_warpgroup(void* mine, const std::function<void(void**)>& act) {
  meet(my_warpgroup().together, self().number % kGroupThreads, kGroupThreads, mine, act,
       "its warpgroup", [] { return kGroupThreads; });
}

}  // namespace emulation
