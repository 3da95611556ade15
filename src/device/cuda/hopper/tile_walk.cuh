// SPDX-License-Identifier: Apache-2.0
// The tile scheduler: which tiles a block computes, and in which order. Every thread derives this
// on its own, from the group sizes alone.
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

// The two blocks of a cluster take two row tiles of the same columns. The odd last row tile of a
// group is paired along columns instead. Clusters take pairs in serpentine order: when pairs get
// smaller, as with the longest groups first, no cluster always gets the larger one.
template <typename Variant>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const KernelArgs& args, int rank)
      : args_(args), rank_(rank), pair_(blockIdx.x / 2) {
    load_group();
  }

  // Advances to the next tile. Returns false if there are no more.
  __device__ __forceinline__ bool next(Tile& tile) {
    while (pair_ >= first_pair_ + group_pairs_) {
      first_pair_ += group_pairs_;
      ++place_;
      if (!Variant::kIsWeightGradient && rows_ == 0) skip_empty_groups();
      if (place_ >= args_.groups) return false;
      load_group();
    }
    tile.group = group_;
    tile.first_row = first_row_;
    tile.rows = rows_;
    tile.k_blocks = Variant::kIsWeightGradient ? (rows_ + kBlock - 1) / kBlock : args_.k_blocks;
    place(tile, pair_ - first_pair_);
    const int clusters = gridDim.x / 2;
    const int to_last = clusters - 1 - static_cast<int>(blockIdx.x / 2);
    pair_ += 1 + 2 * (goes_back_ ? clusters - 1 - to_last : to_last);
    goes_back_ = !goes_back_;
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
    while (place_ < args_.groups && args_.group_rows[place_] == 0) {
      std::int32_t rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int group = place_ + 1 + i;
        rows[i] = group < args_.groups ? args_.group_rows[group] : 1;
      }
      ++place_;
      bool is_empty = true;
#pragma unroll
      for (const std::int32_t count : rows) {
        is_empty = is_empty && count == 0;
        if (is_empty) ++place_;
      }
    }
  }

  __device__ __forceinline__ void load_group() {
    group_ = args_.group_order == nullptr ? place_ : args_.group_order[place_];
    first_row_ = args_.row_offsets[group_];
    rows_ = args_.group_rows[group_];
    row_blocks_ =
        Variant::kIsWeightGradient ? args_.row_blocks : (rows_ + kTileRows - 1) / kTileRows;
    group_pairs_ = row_blocks_ / 2 * args_.column_blocks +
                   (row_blocks_ % 2 != 0 ? (args_.column_blocks + 1) / 2 : 0);
  }

  __device__ __forceinline__ void place(Tile& tile, int pair) {
    const int columns = args_.column_blocks;
    const int row_pairs = row_blocks_ / 2;
    tile.same_rows = pair >= row_pairs * columns;
    tile.idle = false;
    if (tile.same_rows) {
      tile.row_block = row_blocks_ - 1;
      tile.column_block = 2 * (pair - row_pairs * columns) + rank_;
      tile.idle = tile.column_block >= columns;
      return;
    }
    const int band = pair / (kBand * columns);
    const int in_band = pair - band * kBand * columns;
    const int height = min(kBand, row_pairs - band * kBand);
    tile.column_block = in_band / height;
    const int row_pair = band * kBand + in_band - tile.column_block * height;
    tile.row_block = 2 * row_pair + rank_;
  }

  const KernelArgs& args_;
  int rank_;
  int pair_;
  bool goes_back_ = false;
  int place_ = 0;  // in the processing order of groups
  int group_ = 0;
  int first_pair_ = 0;
  int first_row_ = 0;
  int rows_ = 0;
  int row_blocks_ = 0;
  int group_pairs_ = 0;
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
