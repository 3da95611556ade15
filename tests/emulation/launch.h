// SPDX-License-Identifier: Apache-2.0
// Launches of kernels: at once, or when the graph that captures them is replayed.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <tuple>
#include <utility>

#include "emulation/machine.h"
#include "emulation/runtime.h"

namespace emulation {

// Does the work of a stream: now, or whenever the graph that the stream captures is replayed.
void do_on_stream(cudaStream_t stream, std::function<void()> work);
// Notes an error for cudaGetLastError(), and returns false, if no GPU could run such a launch.
bool can_launch(const Launch& launch);

inline Index index_of(dim3 size) { return {size.x, size.y, size.z}; }

template <typename Kernel, typename... Args>
void launch_on_stream(const Launch& launch, cudaStream_t stream, Kernel kernel, Args... args) {
  if (!can_launch(launch)) return;
  do_on_stream(stream, [launch, kernel, args = std::tuple<Args...>(std::move(args)...)] {
    run_grid(launch, [&] { std::apply(kernel, args); });
  });
}

// kernel<<<grid, block, shared, stream>>>(args…) is written launch(kernel, grid, block, shared,
// stream)(args…).
template <typename Kernel>
auto launch(Kernel kernel, dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream) {
  return [=](auto... args) {
    launch_on_stream({index_of(grid), index_of(block), 1, shared_bytes}, stream, kernel,
                     std::move(args)...);
  };
}

template <typename... Parameters, typename... Args>
cudaError_t launch_with_attributes(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                   const Args&... args) {
  const std::size_t most = most_dynamic_bytes(reinterpret_cast<const void*>(kernel));
  if (config->dynamicSmemBytes > most) return noted(cudaErrorInvalidValue);
  Launch launch{.grid = index_of(config->gridDim),
                .block = index_of(config->blockDim),
                .shared_bytes = config->dynamicSmemBytes,
                .most_shared = most > kSharedBytesWithoutAsking ? kSharedBytes : most};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      launch.cluster = attribute.val.clusterDim.x;
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.starts_early = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  launch_on_stream(launch, config->stream, kernel,
                   std::remove_cv_t<std::remove_reference_t<Parameters>>(args)...);
  return cudaGetLastError();
}

}  // namespace emulation
