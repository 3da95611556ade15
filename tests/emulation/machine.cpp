// SPDX-License-Identifier: Apache-2.0
#include "emulation/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

namespace emulation {
namespace {

constexpr int kMostResidentBlocks = 4;
constexpr std::uint64_t kLongestDelay = 24;  // in rounds

thread_local Machine* machine = nullptr;
thread_local Thread* running = nullptr;

unsigned seed() {
  static const char* const given = std::getenv("EMULATION_SEED");
  return given == nullptr ? 1 : static_cast<unsigned>(std::strtoul(given, nullptr, 10));
}

void start_thread(Block& block, unsigned number) {
  if (machine->idle.empty()) {
    machine->threads.push_back(std::make_unique<Thread>());
    machine->idle.push_back(machine->threads.back().get());
  }
  Thread* const thread = machine->idle.back();
  machine->idle.pop_back();
  const Index& size = machine->launch.block;
  thread->block = &block;
  thread->number = static_cast<int>(number);
  thread->index = {number % size.x, number / size.x % size.y, number / size.x / size.y};
  thread->is_done = false;
  thread->is_ready = nullptr;
  thread->fiber.start(*machine->kernel);
  block.threads.push_back(thread);
  block.warps[number / kWarpLanes].alive |= 1U << number % kWarpLanes;
}

std::unique_ptr<Block> make_block(Cluster& cluster, unsigned rank, std::uint64_t number) {
  auto block = std::make_unique<Block>();
  const Index& grid = machine->launch.grid;
  const Index& size = machine->launch.block;
  const unsigned threads = size.x * size.y * size.z;
  block->machine = machine;
  block->cluster = &cluster;
  block->rank = rank;
  block->index = {static_cast<unsigned>(number % grid.x),
                  static_cast<unsigned>(number / grid.x % grid.y),
                  static_cast<unsigned>(number / grid.x / grid.y)};
  block->alive = static_cast<int>(threads);
  block->warps.resize((threads + kWarpLanes - 1) / kWarpLanes);
  block->groups.resize((threads + kGroupThreads - 1) / kGroupThreads);
  block->memory.reset(new std::byte[kFirstAddress + kSharedBytes + 1024]);
  constexpr std::size_t kMostStatic = std::size_t{48} << 10;
  std::memset(block->memory.get(), 0xFF,
              std::min(kFirstAddress + machine->launch.shared_bytes + kMostStatic + 1024,
                       kFirstAddress + kSharedBytes + 1024));
  const auto base = reinterpret_cast<std::uintptr_t>(block->memory.get());
  block->shared = block->memory.get() + ((base + 1023) / 1024 * 1024 - base);
  for (unsigned thread = 0; thread < threads; ++thread) start_thread(*block, thread);
  return block;
}

void end_thread(Thread& thread) {
  thread.is_done = true;
  --thread.block->alive;
  thread.block->warps[thread.number / kWarpLanes].alive &= ~(1U << thread.number % kWarpLanes);
  ++machine->progress;
  if (machine->launch.starts_early && !thread.block->has_waited && thread.block->alive == 0) {
    fail("a block of an early launch ends without waiting for the kernels before");
  }
  for (auto& copy : thread.open_copies) copy();
  thread.open_copies.clear();
  finish_copies(thread.copies, 0);
  const auto is_empty = [](const Copies& group) { return group.empty(); };
  if (!thread.open_stores.empty() || !std::ranges::all_of(thread.stores, is_empty)) {
    fail("a thread ends before its stores have read shared memory");
  }
  thread.stores.clear();
}

// Runs work whose time has come, in a random order.
void run_pending() {
  auto& pending = machine->pending;
  for (std::size_t i = 0; i < pending.size();) {
    if (pending[i].due > machine->round) {
      ++i;
      continue;
    }
    auto work = std::move(pending[i].run);
    pending[i] = std::move(pending.back());
    pending.pop_back();
    work();
    ++machine->progress;
  }
}

[[noreturn]] void report_deadlock() {
  std::map<std::string, std::string> waiting;
  for (const auto& cluster : machine->clusters) {
    for (const auto& block : cluster->blocks) {
      for (const Thread* const thread : block->threads) {
        if (thread->is_done) continue;
        waiting[fmt::format("block {} waits for {}", block->index.x, thread->waits_for)] +=
            fmt::format(" {}", thread->number);
      }
    }
  }
  std::string what = "no thread can continue:";
  for (const auto& [why, threads] : waiting) what += fmt::format("\n  {}: threads{}", why, threads);
  fail(what);
}

void run_thread(Thread& thread) {
  thread.is_ready = nullptr;
  ++machine->progress;
  running = &thread;
  thread.fiber.resume();
  running = nullptr;
  if (thread.fiber.is_done()) end_thread(thread);
}

bool can_continue(const Thread& thread) {
  return !thread.is_done && (thread.is_ready == nullptr || thread.is_ready(thread.condition));
}

bool can_any_continue() {
  for (const auto& cluster : machine->clusters) {
    for (const auto& block : cluster->blocks) {
      for (const Thread* const thread : block->threads) {
        if (can_continue(*thread)) return true;
      }
    }
  }
  return false;
}

// Runs every thread of the block that can continue, warp by warp from a random one on. Sometimes a
// warp is left out.
void run_block(Block& block) {
  const auto warps = block.warps.size();
  const std::size_t first = machine->random() % warps;
  for (std::size_t i = 0; i < warps; ++i) {
    if (machine->flips(8)) continue;
    const std::size_t begin = (first + i) % warps * kWarpLanes;
    const std::size_t end = std::min(begin + kWarpLanes, block.threads.size());
    for (std::size_t t = begin; t < end; ++t) {
      if (can_continue(*block.threads[t])) run_thread(*block.threads[t]);
    }
  }
  for (Warpgroup& group : block.groups) {
    if (group.committed.empty() || !machine->flips(4)) continue;
    const auto products = std::move(group.committed.front());
    group.committed.front().clear();
    for (const Product& product : products) run_product(block, product);
  }
}

// Starts blocks from `next` on while there is room for their cluster.
void start_blocks(std::uint64_t& next, std::uint64_t blocks) {
  const unsigned size = machine->launch.cluster;
  const std::size_t most_clusters = std::max<std::size_t>(1, kMostResidentBlocks / size);
  while (next < blocks && machine->clusters.size() < most_clusters) {
    machine->clusters.push_back(std::make_unique<Cluster>());
    Cluster& cluster = *machine->clusters.back();
    for (unsigned rank = 0; rank < size; ++rank) {
      cluster.blocks.push_back(make_block(cluster, rank, next++));
    }
  }
}

// Removes the clusters that have ended, unless work under way may still write to their memory.
void remove_ended_clusters() {
  if (!machine->pending.empty()) return;
  machine->progress += std::erase_if(machine->clusters, [](const auto& cluster) {
    for (const auto& block : cluster->blocks) {
      if (block->alive != 0) return false;
    }
    for (const auto& block : cluster->blocks) {
      machine->idle.insert(machine->idle.end(), block->threads.begin(), block->threads.end());
    }
    return true;
  });
}

}  // namespace

void fail(const std::string& what) {
  std::fprintf(stderr, "emulated GPU, seed %u: %s\n", seed(), what.c_str());
  if (running != nullptr) {
    std::fprintf(stderr, "  in block %u %u, thread %d\n", running->block->index.x,
                 running->block->index.y, running->number);
  }
  std::abort();
}

void run_grid(const Launch& launch, const std::function<void()>& kernel) {
  if (machine != nullptr) fail("a kernel cannot launch a kernel");
  static thread_local Machine the_machine;
  machine = &the_machine;
  Machine& m = *machine;
  m.launch = launch;
  m.kernel = &kernel;
  m.random.seed(seed());
  m.is_eager = seed() == 0;
  const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (blocks % launch.cluster != 0) fail("the grid is no multiple of the cluster");
  std::uint64_t next = 0;
  while (next < blocks || !m.clusters.empty()) {
    const std::uint64_t progress = m.progress;
    start_blocks(next, blocks);
    ++m.round;
    run_pending();
    for (const auto& cluster : m.clusters) {
      for (const auto& block : cluster->blocks) run_block(*block);
    }
    remove_ended_clusters();
    if (m.progress == progress && m.pending.empty() && !m.clusters.empty() && !can_any_continue()) {
      report_deadlock();
    }
  }
  machine = nullptr;
}

void Machine::later(std::function<void()> work) {
  if (is_eager || random() % 4 == 0) return work();
  pending.push_back({round + random() % kLongestDelay, std::move(work)});
}

Thread& self() { return *running; }

void wait_for_condition(const char* what, bool (*is_ready)(const void*), const void* condition) {
  if (!machine->flips(4) && is_ready(condition)) return;
  Thread& thread = self();
  thread.is_ready = is_ready;
  thread.condition = condition;
  thread.waits_for = what;
  thread.fiber.suspend();
}

void yield() {
  Thread& thread = self();
  thread.is_ready = nullptr;
  thread.fiber.suspend();
}

}  // namespace emulation
