// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

#include <fmt/format.h>
#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <span>
#include <vector>

#include "switchyard/run_ranks.h"

namespace switchyard::cli {
namespace {

constexpr int kMostDefaultRanks = 8;

std::vector<int> find_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  std::vector<int> result;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) result.push_back(cpu);
  }
  return result;
}

// Found once, by a thread that is not pinned to one of them yet.
const std::vector<int>& cores() {
  static const std::vector<int> found = find_cores();
  return found;
}

void stay_on(std::span<const int> allowed) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : allowed) CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace

int num_cores() { return std::max(1, static_cast<int>(cores().size())); }

int core_of(int thread) {
  return cores().empty() ? 0 : cores()[static_cast<std::size_t>(thread) % cores().size()];
}

void pin_to_core(int thread) {
  if (cores().size() <= 1) return;  // the launcher has pinned the process already
  const int core = core_of(thread);
  stay_on({&core, 1});
}

void allow_all_cores() { stay_on(cores()); }

void launch(const LaunchOptions& options, const std::function<void(Communicator&)>& body) {
  num_cores();  // finds the cores before any thread is pinned to one of them
  if (options.comm == "threads") {
    run_ranks(options.ranks > 0 ? options.ranks : std::min(num_cores(), kMostDefaultRanks), body,
              {.timeout = options.timeout});
    return;
  }
  const auto world =
      connect({.backend = options.comm, .timeout = options.timeout, .exit_if_init_hangs = true});
  if (options.ranks > 0 && options.ranks != world->size()) {
    throw CLI::ValidationError(
        "--ranks", fmt::format("{} is not the number of processes that were started, {}; with "
                               "--comm {}, set it by mpirun -n",
                               options.ranks, world->size(), options.comm));
  }
  body(*world);
}

}  // namespace switchyard::cli
