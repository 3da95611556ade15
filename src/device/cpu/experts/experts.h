// Experts on the CPU.
#pragma once

#include "core/memory_cache.h"
#include "device/cpu/workers.h"
#include "device/device_backend.h"

namespace switchyard::cpu {

void experts_forward(const ExpertsForward& args, Workers& workers);
void experts_backward(const ExpertsBackward& args, Workers& workers, MemoryCache& memory);
void shared_forward(const SharedForward& args, Workers& workers);
void shared_backward(const SharedBackward& args, Workers& workers, MemoryCache& memory);

}  // namespace switchyard::cpu
