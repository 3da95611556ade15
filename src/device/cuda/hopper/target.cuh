// SPDX-License-Identifier: Apache-2.0
// Where a tile's columns are, and the destination of a consumer's 64 × 256 accumulators.
#pragma once

#include "device/cuda/hopper/tile_walk.cuh"

namespace switchyard::cuda::hopper {

// The column block of a tile within its part.
template <typename Variant>
__device__ __forceinline__ PartBlock find_columns(const KernelArgs& args, const Tile& tile) {
  const bool has_parts =
      Variant::kIsTransposed || (Variant::kProduct == Product::forward && !Variant::kActivates);
  return has_parts ? split_parts(tile.column_block, args.part_blocks)
                   : PartBlock{0, tile.column_block};
}

// False if the right half of the tile's columns lies outside of the matrix. Such halves are neither
// loaded nor multiplied, except that an activating tile pairs its halves of a gate projection with
// halves of an up projection, and only leaves out the activation.
template <typename Variant>
__device__ __forceinline__ bool has_right_half(const KernelArgs& args, const Tile& tile) {
  constexpr int kColumns = Variant::kColumnsOfPart;
  return find_columns<Variant>(args, tile).block * kColumns + kColumns / 2 < args.columns;
}

// Coordinates in c or in one of its matrices; for transposed products, in the matrix's transpose.
struct Target {
  int row;
  int rows;  // left in the group or matrix from `row` on: may exceed 64, or be 0 or less
  int column;
  int group;
  int part;
};

template <typename Variant>
__device__ __forceinline__ Target find_target(const KernelArgs& args, const Tile& tile,
                                              int consumer) {
  const int in_tile = consumer * 64;
  const bool has_row_parts = Variant::kProduct == Product::weight_gradient;
  const PartBlock m =
      has_row_parts ? split_parts(tile.row_block, args.part_blocks) : PartBlock{0, tile.row_block};
  const PartBlock n = find_columns<Variant>(args, tile);
  const int row = m.block * kTileRows + in_tile;
  const int column = n.block * Variant::kColumnsOfPart;
  const int part = m.part + n.part;
  if constexpr (Variant::kIsWeightGradient) return {row, args.rows - row, column, tile.group, part};
  return {tile.first_row + row, tile.rows - row, column, tile.group, part};
}

// True if the consumer takes part in this tile. In weight gradients both consumers do, even without
// rows of their own, since they synchronise where rows are zeroed.
template <typename Variant>
__device__ __forceinline__ bool has_rows(const Tile& tile, int consumer) {
  if (Variant::kIsWeightGradient) return !tile.idle;
  return !tile.idle && tile.row_block * kTileRows + consumer * 64 < tile.rows;
}

}  // namespace switchyard::cuda::hopper
