// SPDX-License-Identifier: Apache-2.0
// Runs ranks as threads of this process.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/export.h"

namespace switchyard {

// Options of run_ranks().
struct RankOptions {
  std::chrono::milliseconds timeout = ConnectOptions{}.timeout;
};

// Calls fn on num_ranks threads, each with the communicator of one rank, and returns when all have
// ended. If a rank throws, the others are woken out of their collectives, and the first error is
// rethrown here.
SWITCHYARD_API void run_ranks(int num_ranks, const std::function<void(Communicator&)>& fn,
                              const RankOptions& options = {});

// Returns the communicators of num_ranks ranks in this process, for callers that have their own
// threads. Each may be used by any thread.
SWITCHYARD_API std::vector<std::unique_ptr<Communicator>> make_thread_ranks(
    int num_ranks, const RankOptions& options = {});

}  // namespace switchyard
