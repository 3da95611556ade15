// How long something takes on all ranks together.
#pragma once

#include <chrono>

#include "switchyard/communicator.h"

namespace switchyard::cli {

// Collective: seconds from when all ranks are ready until the last has ended.
template <typename Fn>
double timed(Communicator& comm, const Fn& fn) {
  comm.barrier();
  const auto begin = std::chrono::steady_clock::now();
  fn();
  comm.barrier();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace switchyard::cli
