// SPDX-License-Identifier: Apache-2.0
// Peer heaps in host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/peer_memory.h"

namespace switchyard::cpu {

// Creates a heap for ranks that are threads of one process.
std::shared_ptr<PeerHeap> make_peer_heap();

// For ranks that are processes of one host: create this rank's heap, and reach the heap of a peer.
std::shared_ptr<PeerHeap> make_shared_heap(std::function<void(const HeapPiece&)> announce);
std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes);

}  // namespace switchyard::cpu
