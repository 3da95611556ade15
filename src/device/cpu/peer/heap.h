// A heap in the host's memory that ranks which are threads reach.
#pragma once

#include <memory>

#include "device/peer_memory.h"

namespace switchyard::cpu {

std::shared_ptr<PeerHeap> make_peer_heap();

}  // namespace switchyard::cpu
