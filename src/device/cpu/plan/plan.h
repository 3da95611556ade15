// Plan kernels on the CPU.
#pragma once

#include "device/device_backend.h"

namespace switchyard::cpu {

void count_assignments(const CountAssignments& args);
void lay_out(const LayOut& args);
void assign_slots(const AssignSlots& args);

}  // namespace switchyard::cpu
