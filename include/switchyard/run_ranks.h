// Ranks as threads of this process.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/export.h"

namespace switchyard {

struct RankOptions {
  std::chrono::milliseconds timeout = ConnectOptions{}.timeout;
};

// Calls fn once for each of num_ranks ranks, each on a thread of its own, and returns when all have
// ended. If a rank throws, the others are woken out of their collectives; the error that came first
// is thrown here.
SWITCHYARD_API void run_ranks(int num_ranks, const std::function<void(Communicator&)>& fn,
                              const RankOptions& options = {});

// The communicators of a group of num_ranks ranks in this process, for callers that have threads of
// their own; each may be handed to any thread.
SWITCHYARD_API std::vector<std::unique_ptr<Communicator>> make_thread_ranks(
    int num_ranks, const RankOptions& options = {});

}  // namespace switchyard
