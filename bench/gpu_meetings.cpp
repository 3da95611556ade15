// SPDX-License-Identifier: Apache-2.0
// Measures how long ranks on one GPU take to meet, with eager calls and as nodes of a graph.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>

#include "peer/peer_memory.h"
#include "switchyard/captured_graph.h"
#include "switchyard/run_ranks.h"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMeetings = 200;

// Returns the microseconds per meeting on the slowest rank, in the best of several rounds.
double time_on(Communicator& comm, const Device& device, const std::function<void()>& meetings) {
  double best = 1e30;
  for (int round = 0; round < 20; ++round) {
    device.synchronize();
    comm.barrier();
    const auto begin = Clock::now();
    meetings();
    device.synchronize();
    const double spent = std::chrono::duration<double>(Clock::now() - begin).count();
    Tensor longest = Tensor::from<float>({1}, {static_cast<float>(spent)});
    comm.all_reduce(longest, ReduceOp::max);
    best = std::min(best, 1e6 * longest.span<float>()[0] / kMeetings);
  }
  return best;
}

void measure(int num_ranks) {
  run_ranks(num_ranks, [](Communicator& comm) {
    const Device device = Device::cuda();
    const PeerMeetings meetings(PeerMemory::of(comm, device), 0);
    const auto meet_often = [&] {
      for (int i = 0; i < kMeetings; ++i) meetings.close();
    };
    meet_often();
    const double eager = time_on(comm, device, meet_often);
    const CapturedGraph graph(device, meet_often);
    graph.replay();
    const double replayed = time_on(comm, device, [&] { graph.replay(); });
    meetings.check();
    comm.barrier();
    if (comm.rank() == 0) {
      fmt::print("{} ranks: {:.2f} us a meeting, {:.2f} us as a node of a graph\n", comm.size(),
                 eager, replayed);
    }
  });
}

}  // namespace
}  // namespace switchyard

int main() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  for (const int ranks : {2, 4, 8}) switchyard::measure(ranks);
}
