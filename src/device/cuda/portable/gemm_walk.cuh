// SPDX-License-Identifier: Apache-2.0
// The order of tiles: those of a group are adjacent, and within it those that share operands.
#pragma once

#include <cstdint>

#include "device/cuda/portable/gemm_tile.cuh"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda::gemm {

struct TilePlace {
  int row_block;
  int column_tile;
};

// Bands of row blocks sweep over all columns, rows fastest: tiles that run at the same time then
// read about as many lines of a as of b.
__device__ inline TilePlace place_of(int index, int row_blocks, int column_tiles) {
  constexpr int kBand = 16;
  const int band = index / (kBand * column_tiles);
  const int within = index - band * kBand * column_tiles;
  const int height = min(kBand, row_blocks - band * kBand);
  return {band * kBand + within % height, within / height};
}

__device__ inline int tiles_over(int extent, int tile) { return (extent + tile - 1) / tile; }

struct TileInGroup {
  int group;
  int index;
};

// Maps tile indices to groups whose row counts only the device knows. Each warp searches on its
// own, 32 groups at a time.
class GroupWalk {
 public:
  // Finds a tile among those of all groups, in group order. Returns false past the last one.
  // `index` must not decrease from call to call, and must be the same in all lanes.
  __device__ bool find(int index, const std::int32_t* group_rows, int count, int column_tiles,
                       TileInGroup& found) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int end = __shfl_sync(kAllLanes, lane_end_, 31);
    while (index >= end) {
      if (next_ >= count) return false;
      const int mine = next_ + lane;
      const int tiles = mine < count ? tiles_over(group_rows[mine], kTileRows) * column_tiles : 0;
      lane_end_ = end + warp_sum_up_to(tiles);
      lane_begin_ = lane_end_ - tiles;
      end = __shfl_sync(kAllLanes, lane_end_, 31);
      next_ += 32;
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, index < lane_end_))) - 1;
    found = {next_ - 32 + owner, index - __shfl_sync(kAllLanes, lane_begin_, owner)};
    return true;
  }

 private:
  int next_ = 0;        // first group after the 32 examined last, one per lane
  int lane_begin_ = 0;  // tile range of this lane's group
  int lane_end_ = 0;
};

// For problems whose tiles follow from sizes alone.
struct NoWalk {};

}  // namespace switchyard::cuda::gemm
