// SPDX-License-Identifier: Apache-2.0
// Gives every assignment its slot, once the plan is laid out.
#include <cuda_runtime.h>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/plan/slots.cuh"

namespace switchyard::cuda {
namespace {

__global__ void fill_slots_kernel(const Slots s) {
  start_in_turn();
  fill_slots(s);
}

}  // namespace

void assign_slots(const AssignSlots& args, Context& context) {
  const Slots s = slots_of(args);
  if (s.all.count() == 0) return;
  launch_early(fill_slots_kernel,
               {.blocks = blocks_over(s.all.count(), context.num_multiprocessors()),
                .threads = kElementThreads},
               s, "fill_slots_kernel", context);
}

}  // namespace switchyard::cuda
