// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a kernel starts while the one before it in the stream still runs,
// so that its launch takes no time of its own. Other GPUs than Hopper, and the portable kernels,
// launch one after the other.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "device/cuda/hopper/ptx.cuh"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

// Waits until all kernels before this one have ended. A kernel that is launched with launch_early()
// must call this before it touches any memory that they use, even if nothing came before it.
__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  hopper::wait_for_kernels_before();
#endif
}

// Does that, and lets the next kernel start meanwhile if it was launched with launch_early(). Other
// kernels still wait until this one has ended.
__device__ inline void start_in_turn() {
#if __CUDA_ARCH__ >= 900
  hopper::let_next_launch();
#endif
  wait_for_earlier_kernels();
}

constexpr std::size_t kMostSharedBytes = 96 * 1024;  // available on every GPU from sm_80 on

struct Grid {
  unsigned blocks = 1;
  unsigned threads = 1;  // per block
  std::size_t shared_bytes = 0;
  unsigned cluster = 1;  // blocks in each
};

template <typename Args>
void launch_early(void (*kernel)(Args), const Grid& grid, const Args& args, std::string_view name,
                  const Context& context) {
  constexpr std::size_t kWithoutAsking = 47 * 1024;  // 48 KB with the kernel's static variables
  if (grid.shared_bytes > kWithoutAsking) {
    // Ranks launch this kernel from several threads, so none may lower the limit of another.
    const auto most = std::max(grid.shared_bytes, kMostSharedBytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(most)),
          name);
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = context.stream();
  config.attrs = attributes;
  if (context.uses_hopper_kernels()) {
    auto& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    auto& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {grid.cluster, 1, 1};
  }
  check(cudaLaunchKernelEx(&config, kernel, args), name);
}

}  // namespace switchyard::cuda
