// A heap on a GPU that the ranks of this process reach, on the same GPU or on others.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/cuda/runtime/device_memory.h"

namespace switchyard::cuda {

// Addresses for all of a GPU's memory, behind which memory is mapped as it is needed: so the heap
// begins at one address for as long as it lives, wherever it is mapped. Nothing is unmapped before
// its end, because that waits for the GPU, where a peer may be waiting for this rank.
struct HeapSource {
  std::shared_ptr<BlockSource> blocks;
  std::byte* base = nullptr;
  std::int64_t reserved_bytes = 0;
};
HeapSource make_heap_source(int ordinal, std::span<const int> reached_from);

}  // namespace switchyard::cuda
