#include "launch.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <vector>

#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::cli {
namespace {

constexpr int kMostDefaultRanks = 8;

std::vector<int> cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  std::vector<int> result;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) result.push_back(cpu);
  }
  return result;
}

}  // namespace

int num_cores() { return std::max(1, static_cast<int>(cores().size())); }

void pin_to_core(int rank) {
  const auto available = cores();
  if (available.size() <= 1) return;  // a launcher has chosen already
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(available[static_cast<std::size_t>(rank) % available.size()], &set);
  sched_setaffinity(0, sizeof(set), &set);
}

void launch(const LaunchOptions& options, const std::function<void(Communicator&)>& body) {
  if (options.comm == "threads") {
    run_ranks(options.ranks > 0 ? options.ranks : std::min(num_cores(), kMostDefaultRanks), body);
    return;
  }
  const auto world = connect({.backend = options.comm});
  if (options.ranks > 0 && options.ranks != world->size()) {
    throw InvalidArgument(
        fmt::format("--ranks {} differs from the {} processes that were started; "
                    "with --comm {} mpirun -n decides",
                    options.ranks, world->size(), options.comm));
  }
  body(*world);
}

}  // namespace switchyard::cli
