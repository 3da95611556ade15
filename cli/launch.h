// SPDX-License-Identifier: Apache-2.0
// Starts ranks the way that the user asked for.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "switchyard/communicator.h"

namespace switchyard::cli {

constexpr std::chrono::seconds kDefaultTimeout{600};

struct LaunchOptions {
  std::string comm = "threads";
  int ranks = 0;  // threads: 0 = one per core, at most 8; mpi: 0, or the number given to mpirun
  std::chrono::seconds timeout = kDefaultTimeout;  // how long a rank waits for others
};

// Runs `body` on every rank: on threads of this process, or in this process as one of mpirun's.
// Throws CLI::ValidationError if mpirun started another number of processes than options.ranks.
void launch(const LaunchOptions& options, const std::function<void(Communicator&)>& body);

// Returns the number of cores that this process may use.
int num_cores();
// Returns the core for a thread of the job; cores repeat after num_cores() threads.
int core_of(int thread);
// Pins the calling thread to core_of(thread), so that timings are stable.
void pin_to_core(int thread);
// Unpins the calling thread.
void allow_all_cores();

}  // namespace switchyard::cli
