// SPDX-License-Identifier: Apache-2.0
// Times work that all ranks do together.
#pragma once

#include <chrono>
#include <cstdint>

#include "switchyard/communicator.h"

namespace switchyard::cli {

// Collective. Returns the seconds from when all ranks are ready until the last one is done.
template <typename Fn>
double timed(Communicator& comm, const Fn& fn) {
  comm.barrier();
  const auto begin = std::chrono::steady_clock::now();
  fn();
  comm.barrier();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double gigabytes_per_second(std::int64_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds * 1e-9;
}

}  // namespace switchyard::cli
