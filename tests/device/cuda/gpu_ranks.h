// SPDX-License-Identifier: Apache-2.0
// Runs a test body on ranks that share a GPU: threads in a plain run, processes under mpirun.
#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>
#include <vector>

#include "support/device/devices.h"
#include "support/ranks.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/run_ranks.h"

namespace switchyard::testing {

// Calls body on every rank, each with a device of its own that outlives all of them. A rank that
// never comes fails a test instead of holding it up. Under mpirun there are as many as it started.
inline void on_gpu_ranks(int num_ranks,
                         const std::function<void(Communicator&, const Device&)>& body,
                         std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  if (under_mpirun()) {
    const Device device = Device::cuda(cuda_options());
    on_ranks({"mpi", num_ranks}, [&](Communicator& comm) { body(comm, device); });
    return;
  }
  std::vector<Device> devices;
  for (int r = 0; r < num_ranks; ++r) devices.push_back(Device::cuda(cuda_options()));
  run_ranks(num_ranks,
            [&](Communicator& comm) { body(comm, devices[static_cast<std::size_t>(comm.rank())]); },
            {.timeout = timeout});
}

// How many ranks to try.
inline std::vector<int> gpu_rank_counts() {
  if (under_mpirun()) return {rank_cases().front().size};
  return {1, 2, 3, 4, 8};
}

}  // namespace switchyard::testing
