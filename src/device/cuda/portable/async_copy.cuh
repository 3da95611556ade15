// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory that bypass registers (cp.async).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace switchyard::cuda {

__device__ inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Writes 16 bytes: copies the first `bytes` and zeroes the rest. If `bytes` is 0, `from` is not
// read. Both addresses must be 16-byte aligned.
__device__ inline void copy_async_16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// Like copy_async_16(), for 4 bytes.
__device__ inline void copy_async_4(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Closes a group of this thread's copies, which may be empty.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most the last `kPending` groups of this thread are in flight.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace switchyard::cuda
