// Starts ranks the way the user asked for.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "switchyard/communicator.h"

namespace switchyard::cli {

constexpr std::chrono::seconds kDefaultTimeout{600};

struct LaunchOptions {
  std::string comm = "threads";
  int ranks = 0;  // threads: how many, 0 = one a core up to 8; mpi: 0, or what mpirun gave
  std::chrono::seconds timeout = kDefaultTimeout;  // that a rank waits for others
};

// Runs body on every rank: on threads of this process, or on this process as one of mpirun's.
void launch(const LaunchOptions& options, const std::function<void(Communicator&)>& body);

// The cores this process may use.
int num_cores();
// The one that thread so-and-so of the job belongs on: the same again after num_cores() threads.
int core_of(int thread);
// Keeps the calling thread there, so that timings do not wander.
void pin_to_core(int thread);
// And lets it go again.
void allow_all_cores();

}  // namespace switchyard::cli
