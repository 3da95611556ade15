// Routing on the CPU.
#pragma once

#include "core/memory_cache.h"
#include "device/cpu/workers.h"
#include "device/device_backend.h"

namespace switchyard::cpu {

void route_tokens(const RouteTokens& args, Workers& workers, MemoryCache& memory);
void route_tokens_backward(const RouteTokensBackward& args, Workers& workers, MemoryCache& memory);

}  // namespace switchyard::cpu
