// SPDX-License-Identifier: Apache-2.0
// Gives every assignment its slot, once the plan is laid out.
#include <cuda_runtime.h>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/slots.cuh"

namespace switchyard::cuda {
namespace {

__global__ void fill_slots_kernel(const Slots s) { fill_slots(s); }

}  // namespace

void assign_slots(const AssignSlots& args, Context& context) {
  const Slots s = slots_of(args);
  if (s.all.count() == 0) return;
  fill_slots_kernel<<<blocks_over(s.all.count(), context.num_multiprocessors()), kElementThreads, 0,
                      context.stream()>>>(s);
  check(cudaGetLastError(), "fill_slots_kernel");
}

}  // namespace switchyard::cuda
