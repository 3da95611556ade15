// Capacity on the CPU.
#pragma once

#include "device/device_backend.h"

namespace switchyard::cpu {

void limit_picks(const LimitPicks& args);

}  // namespace switchyard::cpu
