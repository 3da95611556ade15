// Capacity on the CPU.
#pragma once

#include "device/device_backend.h"

namespace switchyard::cpu {

std::int64_t limit_picks(const LimitPicks& args);

}  // namespace switchyard::cpu
