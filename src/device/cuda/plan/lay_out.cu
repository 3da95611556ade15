// SPDX-License-Identifier: Apache-2.0
// Lays out a plan from the counts of all ranks.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/plan/layout.cuh"

namespace switchyard::cuda {
namespace {

__global__ void __launch_bounds__(1024) lay_out_kernel(const Layout l) {
  start_in_turn();
  lay_out_ranks(l);
}

}  // namespace

void lay_out(const LayOut& args, Context& context) {
  const auto num_experts = static_cast<int>(args.owners.rows());
  const TensorView totals = context.take({num_experts}, Dtype::i64);
  const int warps = (num_experts + kWarpLanes - 1) / kWarpLanes;
  launch_early(lay_out_kernel,
               {.threads = static_cast<unsigned>(std::min(warps * kWarpLanes, 1024))},
               layout_of(args, elements<std::int64_t>(totals)), "lay_out_kernel", context);
}

}  // namespace switchyard::cuda
