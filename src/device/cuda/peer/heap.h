// Heaps on GPUs that other ranks reach: of this process or another, on the same GPU or others.
#pragma once

#include <cstdint>
#include <memory>

#include "device/cuda/runtime/device_memory.h"
#include "device/peer_memory.h"

namespace switchyard::cuda {

// A heap grows by multiples of this, which every mapping is aligned to.
inline constexpr std::int64_t kHeapStep = std::int64_t{32} << 20;

// Addresses for all of a GPU's memory, behind which memory is mapped as it is needed: so the heap
// begins at one address for as long as it lives, wherever it is mapped. Nothing is unmapped before
// its end, because that waits for the GPU, where a peer may be waiting for this rank.
struct HeapSource {
  std::shared_ptr<BlockSource> blocks;
  std::byte* base = nullptr;
  std::int64_t reserved_bytes = 0;
};
HeapSource make_heap_source(int ordinal, const PeerHeapOptions& options);

std::shared_ptr<ReachedHeap> reach_heap(int ordinal, std::int64_t reserved_bytes);

}  // namespace switchyard::cuda
