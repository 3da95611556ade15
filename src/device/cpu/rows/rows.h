// Row kernels on the CPU.
#pragma once

#include <vector>

#include "device/cpu/simd/row_kernels.h"
#include "device/cpu/workers.h"
#include "device/device_backend.h"

namespace switchyard::cpu {

void scatter_rows(const ScatterRows& args, Workers& workers);
void gather_rows(const GatherRows& args, Workers& workers);
void dot_rows(const DotRows& args, Workers& workers);

// The kernels that this CPU can run, the best last.
std::vector<const RowKernels*> row_kernels_of_this_cpu();
// The best of them.
const RowKernels& row_kernels();

}  // namespace switchyard::cpu
