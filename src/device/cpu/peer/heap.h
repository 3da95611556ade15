// Heaps in the host's memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/peer_memory.h"

namespace switchyard::cpu {

// For ranks that are threads of one process.
std::shared_ptr<PeerHeap> make_peer_heap();

// For ranks that are processes of one host.
std::shared_ptr<PeerHeap> make_shared_heap(std::function<void(const HeapPiece&)> announce);
std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes);

}  // namespace switchyard::cpu
