// Which tiles a block works on, and in which order: decided from the groups' sizes alone, by every
// thread for itself.
#pragma once

#include "device/cuda/hopper/kernel_args.h"

namespace switchyard::cuda::hopper {

// One of a cluster's two blocks' share of a pair of tiles. Both have the same group, and so as many
// blocks of the reduction.
struct Tile {
  int group;
  int first_row;     // of the group
  int rows;          // of the group
  int row_block;     // in tiles
  int column_block;  // in tiles
  int k_blocks;
  bool same_rows;  // as the other block's tile, with other columns; else other rows, same columns
  bool idle;       // no tile was left for this block; it still takes part in the copies
};

// The two blocks of a cluster take two row tiles of the same columns; a group's odd last row tile
// is taken with two column tiles instead. Clusters take pairs in turn, to and fro: where pairs get
// smaller, as with the longest groups first, nobody always has the larger one.
template <typename Variant>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const KernelArgs& args, int rank)
      : args_(args), rank_(rank), pair_(blockIdx.x / 2) {
    load_group();
  }

  // False when there are no more.
  __device__ __forceinline__ bool next(Tile& tile) {
    while (pair_ >= first_pair_ + group_pairs_) {
      if (++place_ >= args_.groups) return false;
      first_pair_ += group_pairs_;
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
  // Pairs of row tiles are taken eight at a time through all columns, so that what they share is
  // still in the cache.
  static constexpr int kBand = 8;

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
  int place_ = 0;  // in the order of groups
  int group_ = 0;
  int first_pair_ = 0;
  int first_row_ = 0;
  int rows_ = 0;
  int row_blocks_ = 0;
  int group_pairs_ = 0;
};

// A block of one of up to two parts.
struct PartBlock {
  int part;
  int block;
};
__device__ __forceinline__ PartBlock split_parts(int block, int part_blocks) {
  const bool second = block >= part_blocks;
  return {second ? 1 : 0, second ? block - part_blocks : block};
}

}  // namespace switchyard::cuda::hopper
