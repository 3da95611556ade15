// SPDX-License-Identifier: Apache-2.0
// Sorts groups by their rows.
#include "device/cuda/grouped_gemm.h"
#include "device/cuda/hopper/fits.h"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda::hopper {
namespace {

constexpr int kOrderThreads = 1024;

// Each warp finds the place of one group: after all with more rows, and after lower groups with
// equally many.
__global__ void __launch_bounds__(kOrderThreads)
    order_groups_kernel(const std::int32_t* group_rows, int count, std::int32_t* order) {
  const int group = static_cast<int>(blockIdx.x) * warps_of_block() + warp_of_thread();
  if (group >= count) return;
  const std::int32_t rows = group_rows[group];
  int before = 0;
  for (int other = lane_of_thread(); other < count; other += kWarpLanes) {
    const std::int32_t others = group_rows[other];
    before += others > rows || (others == rows && other < group) ? 1 : 0;
  }
  before = warp_sum(before);
  if (lane_of_thread() == 0) order[before] = group;
}

}  // namespace

void order_groups(const Groups& groups, std::int32_t* order, Context& context) {
  if (groups.count == 0) return;
  order_groups_kernel<<<blocks_of(groups.count, kOrderThreads / kWarpLanes), kOrderThreads, 0,
                        context.stream()>>>(groups.group_rows, groups.count, order);
  check(cudaGetLastError(), "order_groups");
}

}  // namespace switchyard::cuda::hopper
