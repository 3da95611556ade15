// Plan kernels on the CPU.
#pragma once

#include "device/device_backend.h"

namespace switchyard::cpu {

BadId count_assignments(const CountAssignments& args);
void assign_slots(const AssignSlots& args);

}  // namespace switchyard::cpu
