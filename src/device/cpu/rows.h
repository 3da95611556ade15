// Row kernels on the CPU.
#pragma once

#include "device/cpu/row_kernels.h"
#include "device/device_backend.h"

namespace switchyard::cpu {

void scatter_rows(const ScatterRows& args);
void gather_rows(const GatherRows& args);
void dot_rows(const DotRows& args);

// The kernels for the best instruction set of this CPU.
const RowKernels& row_kernels();

}  // namespace switchyard::cpu
