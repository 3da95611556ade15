// SPDX-License-Identifier: Apache-2.0
// Counts assignments in blocks, and turns the positions within a block into those of a single walk
// over all ids.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/plan/count.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kMostCountWarps = 16;

__global__ void __launch_bounds__(kMostCountWarps* kWarpLanes) count_runs(const Count c) {
  extern __shared__ std::int32_t shared_counters[];  // unless far_counters has them
  start_in_turn();
  const std::int64_t num_counters = static_cast<std::int64_t>(warps_of_block()) * c.num_columns();
  count_block(
      c, c.far_counters != nullptr ? c.far_counters + blockIdx.x * num_counters : shared_counters);
}

__device__ unsigned first_bad_of_blocks(const Count& c) {
  unsigned bad = kNoneBad;
  for (int b = lane_of_thread(); b < c.num_blocks; b += kWarpLanes) {
    bad = min(bad, static_cast<unsigned>(c.block_bad[b]));
  }
  return __reduce_min_sync(kAllLanes, bad);
}

// One warp per column, and one more for the first bad assignment.
__global__ void scan_blocks(const Count c) {
  start_in_turn();
  const int lane = lane_of_thread();
  const int columns = c.num_columns();
  const int column = static_cast<int>(blockIdx.x) * warps_of_block() + warp_of_thread();
  if (column == columns) {
    const unsigned bad = first_bad_of_blocks(c);
    if (lane == 0) note_first_bad(c, bad);
  }
  if (column >= columns) return;
  const std::int32_t* __restrict__ const counts = c.block_counts + column;
  std::int32_t* __restrict__ const bases = c.block_bases + column;
  std::int32_t before = 0;
#pragma unroll 4
  for (int first = 0; first < c.num_blocks; first += kWarpLanes) {
    const std::int64_t at = static_cast<std::int64_t>(first + lane) * columns;
    const std::int32_t count = first + lane < c.num_blocks ? counts[at] : 0;
    const std::int32_t up_to = warp_sum_up_to(count);
    if (first + lane < c.num_blocks) bases[at] = before + up_to - count;
    before += __shfl_sync(kAllLanes, up_to, kWarpLanes - 1);
  }
  if (lane == 0) c.set_total(column, before);
}

__global__ void add_block_bases(const Count c) {
  start_in_turn();
  for (unsigned i = first_element(); i < c.all.count(); i += element_stride()) {
    const std::int64_t block = i / c.block_assignments;
    c.add_bases(i, c.block_bases + block * c.num_columns());
  }
}

// The number of warps per block, where their counters are, and how tokens are split into runs.
struct Cut {
  int warps = kMostCountWarps;
  bool is_far = false;
  std::int64_t run_tokens = 1;
  int num_blocks = 0;
};

Cut cut_tokens(const Count& c, int num_multiprocessors) {
  constexpr std::int64_t kLeastOfRun = 64;  // assignments; fewer are not worth a set of counters
  Cut cut;
  constexpr auto kRoom = static_cast<std::int64_t>(kMostSharedBytes / 4);
  cut.is_far = c.num_columns() > kRoom;
  if (!cut.is_far) {
    cut.warps = static_cast<int>(std::min<std::int64_t>(kMostCountWarps, kRoom / c.num_columns()));
  }
  const std::int64_t top_k = c.all.top_k;
  const std::int64_t at_once = std::max<std::int64_t>(1, kWarpLanes / top_k);
  const std::int64_t most_runs = 2LL * num_multiprocessors * cut.warps;
  const std::int64_t least =
      std::max((kLeastOfRun + top_k - 1) / top_k, (c.all.num_tokens + most_runs - 1) / most_runs);
  cut.run_tokens = (least + at_once - 1) / at_once * at_once;
  const std::int64_t of_block = cut.run_tokens * cut.warps;
  cut.num_blocks = static_cast<int>((c.all.num_tokens + of_block - 1) / of_block);
  return cut;
}

void launch_count_runs(const Count& c, const Cut& cut, Context& context) {
  const std::int64_t near = cut.is_far ? 0 : std::int64_t{cut.warps} * c.num_columns();
  launch_early(count_runs,
               {.blocks = static_cast<unsigned>(cut.num_blocks),
                .threads = static_cast<unsigned>(cut.warps * kWarpLanes),
                .shared_bytes = static_cast<std::size_t>(near * 4)},
               c, "count_runs", context);
}

}  // namespace

void count_assignments(const CountAssignments& args, Context& context) {
  Count c = count_of(args);
  const Cut cut = cut_tokens(c, context.num_multiprocessors());
  const std::int64_t blocks = cut.num_blocks;
  const std::int64_t by_column = blocks * c.num_columns();
  const std::int64_t far = cut.is_far ? by_column * cut.warps : 0;
  const TensorView scratch =
      context.take({std::max<std::int64_t>(1, 2 * by_column + blocks + far)}, Dtype::i32);
  c.run_tokens = cut.run_tokens;
  c.num_blocks = cut.num_blocks;
  c.block_assignments = static_cast<unsigned>(cut.run_tokens * cut.warps) * c.all.top_k;
  c.block_counts = elements<std::int32_t>(scratch);
  c.block_bases = c.block_counts + by_column;
  c.block_bad = c.block_bases + by_column;
  if (cut.is_far) c.far_counters = c.block_bad + blocks;

  if (cut.num_blocks > 0) launch_count_runs(c, cut, context);
  if (cut.num_blocks == 1) return;  // a single block has counted everything
  constexpr int kScanWarps = 8;
  const int scan_grid = c.num_columns() / kScanWarps + 1;  // enough for the additional warp
  launch_early(scan_blocks,
               {.blocks = static_cast<unsigned>(scan_grid), .threads = kScanWarps * kWarpLanes}, c,
               "scan_blocks", context);
  if (cut.num_blocks == 0) return;
  launch_early(add_block_bases,
               {.blocks = blocks_over(c.all.count(), context.num_multiprocessors()),
                .threads = kElementThreads},
               c, "add_block_bases", context);
}

}  // namespace switchyard::cuda
