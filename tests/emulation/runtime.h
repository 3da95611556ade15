// SPDX-License-Identifier: Apache-2.0
// Functions that the parts of the emulated runtime share.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace emulation {

// Keeps an error for cudaGetLastError(), and returns it.
cudaError_t noted(cudaError_t error);
// Returns how much dynamic shared memory a kernel may have.
std::size_t most_dynamic_bytes(const void* kernel);
// Waits until all streams have done their work.
void wait_for_streams();

}  // namespace emulation
