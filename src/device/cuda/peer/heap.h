// SPDX-License-Identifier: Apache-2.0
// GPU heaps that other ranks can access, from this process or another, on the same GPU or another.
#pragma once

#include <cstdint>
#include <memory>

#include "device/cuda/runtime/device_memory.h"
#include "device/peer_memory.h"

namespace switchyard::cuda {

// A heap grows by multiples of this size, and every mapping is aligned to it.
inline constexpr std::int64_t kHeapStep = std::int64_t{32} << 20;

// Reserves addresses for all of a GPU's memory and maps memory into them as it is needed, so a heap
// keeps its base address for as long as it lives, in every process that maps it. Nothing is
// unmapped before the heap is destroyed: unmapping waits for the GPU, where a peer may wait for
// this rank.
struct HeapSource {
  std::shared_ptr<BlockSource> blocks;
  std::byte* base = nullptr;
  std::int64_t reserved_bytes = 0;
};
HeapSource make_heap_source(int ordinal, const PeerHeapOptions& options);

std::shared_ptr<ReachedHeap> reach_heap(int ordinal, std::int64_t reserved_bytes);

}  // namespace switchyard::cuda
