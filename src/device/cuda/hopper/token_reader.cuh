// SPDX-License-Identifier: Apache-2.0
// Gathers rows of A from tokens: one to four warps write what TMA would, in pieces of 16 bytes with
// cp.async. The lanes of a warp share the lookup of tokens, one to four rows per lane. The work per
// k block is kept small, because the readers must keep up with the tensor cores.
#pragma once

#include <cstddef>
#include <type_traits>

#include "device/cuda/hopper/pipeline.cuh"
#include "device/cuda/hopper/tile_walk.cuh"

namespace switchyard::cuda::hopper {

// Maps each row of the group to its source token. Rows past the end of the group read the token of
// the last row; their results are discarded or their lines zeroed. Used by all lanes of a warp.
class TokenRowsOfWarp {
 public:
  __device__ __forceinline__ explicit TokenRowsOfWarp(const Tokens& tokens)
      : tokens_(tokens), lane_(static_cast<int>(threadIdx.x % 32)) {}

  __device__ __forceinline__ std::uint32_t source_of(const Tile& tile, int row) const {
    if (tile.idle || tile.rows == 0) return 0;
    return static_cast<std::uint32_t>(tokens_.sources[tile.first_row + min(row, tile.rows - 1)]);
  }
  __device__ __forceinline__ std::uint32_t token_of(std::uint32_t source) const {
    return tokens_.top_k.divide(source);
  }
  // Returns the row of the token that `lane` has looked up.
  __device__ __forceinline__ const std::byte* row_of(std::uint32_t token, int lane) const {
    return data() + std::uint64_t{__shfl_sync(~0U, token, lane)} * tokens_.stride;
  }
  __device__ __forceinline__ const std::byte* data() const {
    return static_cast<const std::byte*>(tokens_.data);
  }
  __device__ __forceinline__ int columns() const { return tokens_.columns; }
  __device__ __forceinline__ int lane() const { return lane_; }

 private:
  const Tokens& tokens_;
  const int lane_;
};

// Reads lines along k. A stage has 128 lines, one per row, and each warp reads its share of them. A
// lane copies the same piece of every fourth line, from the same rows in all k blocks of a tile.
// Lines far past the end of the group are not written.
template <int kWarps>
class AlongKReader {
 public:
  __device__ __forceinline__ AlongKReader(const Tokens& tokens, int warp)
      : rows_(tokens), first_row_(warp * kLinesOfWarp) {}

  // Asks for the sources of the tile's rows, which begin() uses.
  __device__ __forceinline__ void look_up(const Tile& tile) {
    const int first_row = tile.row_block * kTileRows + first_row_;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      found_[i] = rows_.source_of(tile, first_row + i * 32 + rows_.lane());
    }
    num_rows_ = tile.rows - first_row;
  }
  __device__ __forceinline__ void begin(const Tile& /*tile*/) {
#pragma unroll
    for (std::uint32_t& place : found_) place = rows_.token_of(place);
#pragma unroll
    for (int i = 0; i < kLinesOfLane; ++i) {
      const int line = first_line() + i * kStep;
      from_[i] = rows_.row_of(found_[i * kStep / 32], line) + piece() * 16;
    }
  }

  __device__ __forceinline__ void copy(int k, std::uint32_t to) const {
    switch (k % kBlocksOfPointer) {
      case 0:
        return copy_block<0>(k, to);
      case 1:
        return copy_block<1>(k, to);
      case 2:
        return copy_block<2>(k, to);
      default:
        return copy_block<3>(k, to);
    }
  }
  __device__ __forceinline__ void find_next(const Tile& /*tile*/, int k) {
    if (k % kBlocksOfPointer != kBlocksOfPointer - 1) return;
#pragma unroll
    for (const std::byte*& from : from_) from += kBlocksOfPointer * 128;
  }

 private:
  static constexpr int kStep = 4;
  static constexpr int kLinesOfWarp = kTileRows / kWarps;
  static constexpr int kRowsOfLane = kLinesOfWarp / 32;
  static constexpr int kLinesOfLane = kLinesOfWarp / kStep;
  static constexpr int kBlocksOfPointer = 4;

  // Pointers advance only every kBlocksOfPointer blocks, because updating one waits for the copy
  // that reads it. Columns past the last one become zeros, as in B.
  template <int kBlockOfPointer>
  __device__ __forceinline__ void copy_block(int k, std::uint32_t to) const {
    const bool inside = k * kBlock + piece() * 8 < rows_.columns();
    const std::uint32_t line = to + (first_row_ + first_line()) * 128;
    // The swizzle repeats every eight lines, so two addresses are enough.
    const std::uint32_t even = line + (piece() ^ first_line()) * 16;
    const std::uint32_t odd = line + (piece() ^ (first_line() + kStep)) * 16;
#pragma unroll
    for (int i = 0; i < kLinesOfLane; ++i) {
      // A check per line would take too long. The one after eight lines is for experts with few
      // rows: lines past the last row only repeat it.
      const bool is_checked = i == 2 || i % 8 == 0;
      if (is_checked && i * kStep >= num_rows_) return;
      copy_piece((i % 2 == 0 ? even : odd) + i * kStep * 128, from_[i] + kBlockOfPointer * 128,
                 inside);
    }
  }

  __device__ __forceinline__ int first_line() const { return rows_.lane() / 8; }
  __device__ __forceinline__ int piece() const { return rows_.lane() % 8; }

  TokenRowsOfWarp rows_;
  const int first_row_;  // of the warp, in the tile
  int num_rows_ = 0;     // left in the group from there on
  std::uint32_t found_[kRowsOfLane];
  const std::byte* from_[kLinesOfLane];
};

// Reads lines across k, with four warps. A stage has 64 rows of 256 bytes; a thread copies the same
// piece of every eighth row. Each k block has different rows: their addresses are computed one
// block ahead, and their sources are prefetched two blocks ahead.
class AcrossKReader {
 public:
  __device__ __forceinline__ AcrossKReader(const Tokens& tokens, int warp)
      : rows_(tokens),
        first_line_(warp * 2 + rows_.lane() / 16),
        found_line_(warp * 2 + rows_.lane() % 2 + rows_.lane() % 16 / 2 * kStep) {}

  __device__ __forceinline__ void look_up(const Tile& /*tile*/) {}
  __device__ __forceinline__ void begin(const Tile& tile) {
    const int column = tile.row_block * kTileRows + piece() * 8;
    offset_ = column < rows_.columns() ? column * 2 : 0;
    source_ = rows_.source_of(tile, found_line_);
    find_rows();
    source_ = rows_.source_of(tile, kBlock + found_line_);
  }

  __device__ __forceinline__ void copy(int /*k*/, std::uint32_t to) const {
    const std::uint32_t line = to + piece() / 8 * kBoxBytes + first_line_ * 128;
    const std::uint32_t first = line + (piece() % 8 ^ first_line_ % 8) * 16;
#pragma unroll
    for (int i = 0; i < kLinesOfThread; ++i) copy_piece(first + i * kStep * 128, from_[i]);
  }
  __device__ __forceinline__ void find_next(const Tile& tile, int k) {
    find_rows();
    source_ = rows_.source_of(tile, (k + 2) * kBlock + found_line_);
  }

 private:
  static constexpr int kStep = 8;
  static constexpr int kLinesOfThread = kBlock / kStep;

  __device__ __forceinline__ int piece() const { return rows_.lane() % 16; }

  __device__ __forceinline__ void find_rows() {
    const std::uint32_t token = rows_.token_of(source_);
#pragma unroll
    for (int i = 0; i < kLinesOfThread; ++i) {
      from_[i] = rows_.row_of(token, 2 * i + rows_.lane() / 16) + offset_;
    }
  }

  TokenRowsOfWarp rows_;
  const int first_line_;
  const int found_line_;
  int offset_ = 0;            // offset of the piece in its row, in bytes
  std::uint32_t source_ = 0;  // source of a row in the block after that of `from_`
  const std::byte* from_[kLinesOfThread];
};

template <typename Variant>
using TokenReader = std::conditional_t<Variant::kIsWeightGradient, AcrossKReader,
                                       AlongKReader<Variant::kProducers / 32>>;

}  // namespace switchyard::cuda::hopper
