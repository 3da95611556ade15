// SPDX-License-Identifier: Apache-2.0
// Counts what kernels do. Work that nobody needs changes no result, so only these counts show it.
#pragma once

#include <atomic>
#include <cstdint>

namespace emulation {

// What all kernels have done since the program started.
struct WorkDone {
  std::atomic<std::uint64_t> products;      // multiplications of wgmma
  std::atomic<std::uint64_t> loaded_bytes;  // by TMA; once if they go to both blocks of a pair
  std::atomic<std::uint64_t> copied_bytes;  // by cp.async, without the zeros that it fills in
};
WorkDone& work_done();

}  // namespace emulation
