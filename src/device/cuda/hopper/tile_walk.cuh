// SPDX-License-Identifier: Apache-2.0
// The order of tiles: pairs of tiles, one for each block of a cluster, group after group.
#pragma once

#include "device/cuda/hopper/kernel_args.h"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda::hopper {

// The tile of one block, out of the pair that its cluster computes. Both tiles belong to the same
// group, so they have equally many k blocks.
struct Tile {
  int group;
  int first_row;     // first row of the group
  int rows;          // rows in the group
  int row_block;     // in tiles
  int column_block;  // in tiles
  int k_blocks;
  bool same_rows;  // the pair shares its rows; otherwise it shares its columns
  bool idle;       // no tile is left for this block; it still takes part in the copies
};

// The group that a walk has reached; all zero before the first.
struct WalkState {
  int next_place;  // after the group, in the processing order
  int group;
  int first_pair;
  int first_row;
  int rows;
  int row_blocks;
  int group_pairs;
};

// Which pair of tiles a cluster takes next. With tickets, clusters take pairs as they become free.
// Otherwise they take turns in serpentine order: when pairs get smaller, as with the longest groups
// first, no cluster always gets the larger one. Used by whole warps; with tickets, by one warp per
// cluster.
class PairOrder {
 public:
  __device__ __forceinline__ explicit PairOrder(std::int32_t* tickets)
      : tickets_(tickets),
        clusters_(static_cast<int>(gridDim.x / 2)),
        next_(static_cast<int>(blockIdx.x / 2) - clusters_) {}

  // The first pair is the cluster's own. A ticket is drawn one call ahead, to hide the latency.
  __device__ __forceinline__ int next() {
    if (tickets_ != nullptr) {
      const int pair = clusters_ + __shfl_sync(kAllLanes, next_, 0);
      if (lane_of_thread() == 0) next_ = atomicAdd(tickets_, 1);
      return pair;
    }
    const int pair = clusters_ + next_;
    const int to_last = clusters_ - 1 - static_cast<int>(blockIdx.x / 2);
    next_ += 1 + 2 * (goes_back_ ? clusters_ - 1 - to_last : to_last);
    goes_back_ = !goes_back_;
    return pair;
  }

  // Called when the pairs are used up. The last cluster resets the tickets for the next kernel.
  __device__ __forceinline__ void end() {
    if (tickets_ == nullptr || lane_of_thread() != 0) return;
    __threadfence();  // after this cluster's last ticket
    if (atomicAdd(tickets_ + 1, 1) != clusters_ - 1) return;
    tickets_[0] = 0;
    tickets_[1] = 0;
  }

 private:
  std::int32_t* tickets_;
  const int clusters_;
  int next_;  // less the number of clusters
  bool goes_back_ = false;
};

// Walks over the pairs of tiles of one cluster. The two blocks of a cluster take two row tiles of
// the same columns. The odd last row tile of a group is paired along columns instead. Used by whole
// warps.
template <typename Variant>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const KernelArgs& args, WalkState& state)
      : args_(args), at_(state) {}

  // Advances to this pair, and sets `tile` to that of the first block. Returns false if there is no
  // such pair; the walk is then over.
  __device__ __forceinline__ bool advance_to(int pair, Tile& tile) {
    if (pair >= at_.first_pair + at_.group_pairs && !find_group(pair)) return false;
    tile.group = at_.group;
    tile.first_row = at_.first_row;
    tile.rows = at_.rows;
    tile.k_blocks = Variant::kIsWeightGradient ? (at_.rows + kBlock - 1) / kBlock : args_.k_blocks;
    place(tile, pair - at_.first_pair);
    return true;
  }

 private:
  // Bands of eight pairs of row tiles sweep over all columns, so that the operands they share are
  // still in L2.
  static constexpr int kBand = 8;

  static constexpr int kGroupsOfLane = 2;

  __device__ __forceinline__ bool find_group(int pair) {
    if constexpr (Variant::kIsWeightGradient) {
      return find_among_equals(pair);
    } else {
      return find_among_rows(pair);
    }
  }

  // All groups of a weight gradient have equally many pairs.
  __device__ __forceinline__ bool find_among_equals(int pair) {
    at_.row_blocks = args_.row_blocks;
    at_.group_pairs = pairs_of(args_.row_blocks);
    const int place = pair / at_.group_pairs;
    if (place >= args_.groups) return false;
    at_.first_pair = place * at_.group_pairs;
    at_.group = args_.group_order == nullptr ? place : args_.group_order[place];
    at_.first_row = args_.row_offsets[at_.group];
    at_.rows = args_.group_rows[at_.group];
    return true;
  }

  // Looks at 64 groups at a time, two per lane, since every look takes the latency of memory. One
  // after the other, the groups of a layer with many experts would take longer than their tiles.
  __device__ __forceinline__ bool find_among_rows(int pair) {
    int before = at_.first_pair + at_.group_pairs;
    for (; at_.next_place < args_.groups; at_.next_place += kGroupsOfLane * kWarpLanes) {
      const int first_group = at_.next_place + lane_of_thread() * kGroupsOfLane;
      int rows[kGroupsOfLane];
      int first_rows[kGroupsOfLane];
      int pairs = 0;
#pragma unroll
      for (int i = 0; i < kGroupsOfLane; ++i) {
        const int group = first_group + i;
        rows[i] = group < args_.groups ? args_.group_rows[group] : 0;
        first_rows[i] = group < args_.groups ? args_.row_offsets[group] : 0;
      }
#pragma unroll
      for (const int of_group : rows) pairs += pairs_of(row_blocks_of(of_group));
      const int end = before + warp_sum_up_to(pairs);
      const unsigned beyond = __ballot_sync(kAllLanes, pair < end);
      if (beyond != 0) {
        find_in_lane(pair, end - pairs, first_group, rows, first_rows);
        from_lane(__ffs(static_cast<int>(beyond)) - 1);
        return true;
      }
      before = __shfl_sync(kAllLanes, end, kWarpLanes - 1);
    }
    return false;
  }

  // Moves to whichever of this lane's groups has the pair. If none has, the result is not used.
  __device__ __forceinline__ void find_in_lane(int pair, int first_pair, int first_group,
                                               const int (&rows)[kGroupsOfLane],
                                               const int (&first_rows)[kGroupsOfLane]) {
    at_.first_pair = first_pair;
    at_.group = first_group;
    at_.rows = rows[0];
    at_.first_row = first_rows[0];
#pragma unroll
    for (int i = 1; i < kGroupsOfLane; ++i) {
      const int end = at_.first_pair + pairs_of(row_blocks_of(at_.rows));
      if (pair < end) continue;
      at_.first_pair = end;
      at_.group = first_group + i;
      at_.rows = rows[i];
      at_.first_row = first_rows[i];
    }
  }

  // Moves all lanes to where this one is.
  __device__ __forceinline__ void from_lane(int lane) {
    at_.group = __shfl_sync(kAllLanes, at_.group, lane);
    at_.rows = __shfl_sync(kAllLanes, at_.rows, lane);
    at_.first_pair = __shfl_sync(kAllLanes, at_.first_pair, lane);
    at_.first_row = __shfl_sync(kAllLanes, at_.first_row, lane);
    at_.row_blocks = row_blocks_of(at_.rows);
    at_.group_pairs = pairs_of(at_.row_blocks);
    at_.next_place = at_.group + 1;
  }

  __device__ __forceinline__ static int row_blocks_of(int rows) {
    return (rows + kTileRows - 1) / kTileRows;
  }
  __device__ __forceinline__ int pairs_of(int row_blocks) const {
    return row_blocks / 2 * args_.column_blocks +
           (row_blocks % 2 != 0 ? (args_.column_blocks + 1) / 2 : 0);
  }

  __device__ __forceinline__ void place(Tile& tile, int pair) const {
    const int columns = args_.column_blocks;
    const int row_pairs = at_.row_blocks / 2;
    tile.same_rows = pair >= row_pairs * columns;
    tile.idle = false;
    if (tile.same_rows) {
      tile.row_block = at_.row_blocks - 1;
      tile.column_block = 2 * (pair - row_pairs * columns);
      return;
    }
    const int band = pair / (kBand * columns);
    const int in_band = pair - band * kBand * columns;
    const int height = min(kBand, row_pairs - band * kBand);
    tile.column_block = in_band / height;
    tile.row_block = 2 * (band * kBand + in_band - tile.column_block * height);
  }

  const KernelArgs& args_;
  WalkState& at_;
};

// A block index within one of up to two parts.
struct PartBlock {
  int part;
  int block;
};
__device__ __forceinline__ PartBlock split_parts(int block, int part_blocks) {
  const bool second = block >= part_blocks;
  return {second ? 1 : 0, second ? block - part_blocks : block};
}

}  // namespace switchyard::cuda::hopper
