// Memory of the host that a GPU copies to without the driver's help.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

class PinnedBuffer {
 public:
  PinnedBuffer() { at_least(1); }  // taking it may wait, which is best done at once

  // Its bytes; what was there is lost when it grows.
  std::byte* at_least(std::size_t bytes) {
    if (bytes > size_) {
      const std::size_t size = bytes < 65536 ? 65536 : 2 * bytes;
      void* memory = nullptr;
      check(cudaHostAlloc(&memory, size, cudaHostAllocDefault), "taking pinned memory");
      memory_ = Memory(static_cast<std::byte*>(memory), [](std::byte* old) { cudaFreeHost(old); });
      size_ = size;
    }
    return memory_.get();
  }

 private:
  using Memory = std::unique_ptr<std::byte, void (*)(std::byte*)>;
  Memory memory_{nullptr, [](std::byte*) {}};
  std::size_t size_ = 0;
};

}  // namespace switchyard::cuda
