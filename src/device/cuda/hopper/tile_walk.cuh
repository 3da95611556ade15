// SPDX-License-Identifier: Apache-2.0
// The order of tiles: pairs of tiles, one for each block of a cluster, group after group.
#pragma once

#include "device/cuda/hopper/kernel_args.h"

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

// Where a walk is, between two of its steps.
struct WalkState {
  int place;  // in the processing order of groups
  int group;
  int first_pair;
  int first_row;
  int rows;
  int row_blocks;
  int group_pairs;
};

// Which pair of tiles a cluster takes next. With tickets, clusters take pairs as they become free.
// Otherwise they take turns in serpentine order: when pairs get smaller, as with the longest groups
// first, no cluster always gets the larger one.
class PairOrder {
 public:
  __device__ __forceinline__ explicit PairOrder(std::int32_t* tickets)
      : tickets_(tickets),
        clusters_(static_cast<int>(gridDim.x / 2)),
        next_(static_cast<int>(blockIdx.x / 2) - clusters_) {}

  // The first pair is the cluster's own. A ticket is drawn one call ahead, to hide the latency.
  __device__ __forceinline__ int next() {
    const int pair = clusters_ + next_;
    if (tickets_ != nullptr) {
      next_ = atomicAdd(tickets_, 1);
    } else {
      const int to_last = clusters_ - 1 - static_cast<int>(blockIdx.x / 2);
      next_ += 1 + 2 * (goes_back_ ? clusters_ - 1 - to_last : to_last);
      goes_back_ = !goes_back_;
    }
    return pair;
  }

  // Called when the pairs are used up. The last cluster resets the tickets for the next kernel.
  __device__ __forceinline__ void end() {
    if (tickets_ == nullptr) return;
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
// the same columns. The odd last row tile of a group is paired along columns instead.
template <typename Variant>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const KernelArgs& args, WalkState& state)
      : args_(args), at_(state) {}

  __device__ __forceinline__ void begin() {
    at_ = {};
    load_group();
  }

  // Advances to this pair, and sets `tile` to that of the first block. Returns false if there is no
  // such pair; the walk is then over.
  __device__ __forceinline__ bool advance_to(int pair, Tile& tile) {
    while (pair >= at_.first_pair + at_.group_pairs) {
      at_.first_pair += at_.group_pairs;
      ++at_.place;
      if (!Variant::kIsWeightGradient && at_.rows == 0) skip_empty_groups();
      if (at_.place >= args_.groups) return false;
      load_group();
    }
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

  // Moves on to the next group with rows. Called after an empty group, because with few tokens most
  // groups are empty. Several are looked at together, since each look waits for memory.
  __device__ __forceinline__ void skip_empty_groups() {
    constexpr int kAtOnce = 8;
    while (at_.place < args_.groups && args_.group_rows[at_.place] == 0) {
      std::int32_t rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int group = at_.place + 1 + i;
        rows[i] = group < args_.groups ? args_.group_rows[group] : 1;
      }
      ++at_.place;
      bool is_empty = true;
#pragma unroll
      for (const std::int32_t count : rows) {
        is_empty = is_empty && count == 0;
        if (is_empty) ++at_.place;
      }
    }
  }

  __device__ __forceinline__ void load_group() {
    at_.group = args_.group_order == nullptr ? at_.place : args_.group_order[at_.place];
    at_.first_row = args_.row_offsets[at_.group];
    at_.rows = args_.group_rows[at_.group];
    at_.row_blocks =
        Variant::kIsWeightGradient ? args_.row_blocks : (at_.rows + kTileRows - 1) / kTileRows;
    at_.group_pairs = at_.row_blocks / 2 * args_.column_blocks +
                      (at_.row_blocks % 2 != 0 ? (args_.column_blocks + 1) / 2 : 0);
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
