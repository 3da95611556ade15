// SPDX-License-Identifier: Apache-2.0
// The emulated GPU: runs a grid of blocks, every thread on a fiber of its own, on the calling
// thread. Threads run in a random order, and asynchronous copies and products happen at random
// times between their issue and the wait for them. EMULATION_SEED in the environment chooses both.
//
// A program that is wrong ends with a message: if no thread can continue (a deadlock, with what
// each thread waits for), if a barrier gets more arrivals than it expects, or if an address is
// outside of shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "emulation/fibers.h"

namespace emulation {

struct Index {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};

// Shared memory of a block. It begins at an address that is not 0 and a multiple of 128 only, so
// that kernels must align what needs more.
constexpr std::size_t kSharedBytes = std::size_t{227} << 10;
constexpr std::size_t kSharedBytesWithoutAsking = std::size_t{48} << 10;
constexpr std::uint32_t kFirstAddress = 1024 + 128;

struct Launch {
  Index grid{1, 1, 1};
  Index block{1, 1, 1};
  unsigned cluster = 1;  // blocks in each
  std::size_t shared_bytes = 0;
  std::size_t most_shared = kSharedBytes;  // with static variables
  bool starts_early = false;               // before the kernels that precede it have ended
};

// Runs `kernel` in every thread of a grid, and returns when all have ended.
void run_grid(const Launch& launch, const std::function<void()>& kernel);

// Prints what is wrong with the kernel, and ends the program.
[[noreturn]] void fail(const std::string& what);

constexpr int kWarpLanes = 32;
constexpr int kGroupThreads = 128;  // of a warpgroup

struct Block;
struct Machine;

// Threads that do something together: lanes of a warp, or the threads of a warpgroup. The first one
// to run after all have arrived does it for all.
struct Together {
  std::vector<void*> operands;             // by number in the group; null: not arrived
  const std::type_info* action = nullptr;  // of those that have arrived
  int arrived = 0;
  unsigned generation = 0;
};

// A pending wgmma. Its accumulators are 64 rows of `columns`, held by 128 threads.
struct Product {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  bool a_is_across = false;
  bool b_is_across = false;
  bool continues = false;
  int columns = 0;
  float* sums[kGroupThreads] = {};
};

struct Warpgroup {
  Together together;
  std::vector<Product> open;  // issued, not committed
  std::deque<std::vector<Product>> committed;
};

struct Warp {
  unsigned alive = 0;  // lanes that have not ended
  Together all;
  std::unordered_map<unsigned, Together> some;  // by mask
};

// Copies that a thread has issued and that have not happened yet.
using Copies = std::vector<std::function<void()>>;

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Index index;
  int number = 0;  // in the block
  bool is_done = true;
  bool (*is_ready)(const void*) = nullptr;
  const void* condition = nullptr;
  const char* waits_for = "";
  Copies open_copies;         // cp.async
  std::deque<Copies> copies;  // committed groups of them
  Copies open_stores;         // of TMA
  std::deque<Copies> stores;
};

// An mbarrier.
struct Barrier {
  int arrivals = 0;
  int pending = 0;
  int bytes = 0;       // expected, and not there yet
  unsigned phase = 0;  // parity of the phase that is under way
};

struct NamedBarrier {
  int arrived = 0;
  unsigned generation = 0;
};

struct Cluster;

struct Block {
  Machine* machine = nullptr;
  Cluster* cluster = nullptr;
  unsigned rank = 0;  // in the cluster
  Index index;
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> groups;
  int alive = 0;
  bool has_waited = false;  // for the kernels before
  std::unique_ptr<std::byte[]> memory;
  std::byte* shared = nullptr;   // what address 0 of shared memory would be
  std::size_t static_bytes = 0;  // taken by static variables
  std::unordered_map<const void*, std::size_t> variables;
  NamedBarrier named[16];
  int votes[2] = {};  // of __syncthreads_or and its like, by the parity of the generation
  std::unordered_map<std::uint32_t, Barrier> barriers;  // by address
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  NamedBarrier barrier;
};

// xorshift64*
class Random {
 public:
  void seed(std::uint64_t number) { state_ = number * 0x9E3779B97F4A7C15U + 1; }
  unsigned operator()() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<unsigned>(state_ * 0x2545F4914F6CDD1DU >> 33);
  }

 private:
  std::uint64_t state_ = 1;
};

struct Machine {
  Launch launch;
  const std::function<void()>* kernel = nullptr;
  std::vector<std::unique_ptr<Cluster>> clusters;  // resident
  std::vector<std::unique_ptr<Thread>> threads;    // a pool of them
  std::vector<Thread*> idle;
  Random random;
  bool is_eager = false;  // asynchronous work happens when it is issued
  std::uint64_t round = 0;
  std::uint64_t progress = 0;  // counts events that may let a waiting thread continue
  struct Pending {
    std::uint64_t due;
    std::function<void()> run;
  };
  std::vector<Pending> pending;

  bool flips(unsigned one_in) { return !is_eager && random() % one_in == 0; }
  // Runs `work` now or in some later round.
  void later(std::function<void()> work);
};

// Returns the thread that is running.
Thread& self();

// Suspends the running thread until `is_ready()`.
template <typename IsReady>
void wait_until(const char* what, const IsReady& is_ready);
void wait_for_condition(const char* what, bool (*is_ready)(const void*), const void* condition);

template <typename IsReady>
void wait_until(const char* what, const IsReady& is_ready) {
  wait_for_condition(
      what, [](const void* condition) { return (*static_cast<const IsReady*>(condition))(); },
      &is_ready);
}
// Lets other threads run.
void yield();

// Returns the address in host memory of a shared address of this block, or of one that mapa made.
std::byte* shared_at(std::uint32_t address, std::size_t bytes);
// The same for an address of that block.
std::byte* shared_in(const Block& block, std::uint32_t offset, std::size_t bytes);
Block& block_of(std::uint32_t address);
std::uint32_t shared_address_of(const void* pointer);
std::byte* static_variable(const void* tag, std::size_t bytes);
std::byte* dynamic_memory();

// mbarriers.
void init_barrier(std::uint32_t address, int arrivals);
void arrive(Block& block, std::uint32_t offset, int bytes_expected);
void complete_bytes(Block& block, std::uint32_t offset, int bytes);
void wait_for_phase(std::uint32_t address, unsigned parity);

void sync_block(int barrier, int threads);  // 0 threads: all that have not ended
int sync_block_and_count(bool vote);
void sync_cluster();

// The lanes of `mask` meet. The last one calls act(operands by lane).
void meet_lanes(unsigned mask, void* mine, const std::function<void(void**)>& act);
// All threads of the warpgroup meet.
void meet_warpgroup(void* mine, const std::function<void(void**)>& act);

Warpgroup& my_warpgroup();
void run_product(Block& block, const Product& product);
// Runs committed products until only `pending` groups are left.
void finish_products(int pending);
// Runs committed copies until only `pending` groups of them are left.
void finish_copies(std::deque<Copies>& groups, std::size_t pending);

}  // namespace emulation
