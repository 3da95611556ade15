// Rows of A that are read from tokens: what a bulk copy would put into shared memory, put there in
// pieces of 16 bytes by a warp or four.
#pragma once

#include <cstddef>

#include "device/cuda/hopper/boxes.cuh"
#include "device/cuda/hopper/pipeline.cuh"
#include "device/cuda/hopper/tile_walk.cuh"

namespace switchyard::cuda::hopper {

// A stage of A has 1024 pieces. Along k a line is a row of the tile, and a thread
// has the same rows in every block of the reduction; across k a line is half of a row of the block,
// and the rows are others every time.
template <typename Variant>
class TokenReader {
 public:
  __device__ __forceinline__ TokenReader(const Tokens& tokens, int thread)
      : tokens_(tokens), line_(thread / kRowPieces), piece_(thread % kRowPieces) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    find_sources(tile, kAlongK ? tile.row_block * kTileRows : 0);
    if constexpr (kAlongK) find_tokens();
  }

  __device__ __forceinline__ void copy(const Tile& tile, int k, std::uint32_t to) {
    if constexpr (!kAlongK) find_tokens();
    const int column = (kAlongK ? k * kBlock : tile.row_block * kTileRows) + piece_ * kElements;
    const bool inside = column < tokens_.columns;
    const auto* from = static_cast<const std::byte*>(tokens_.data) + (inside ? column * 2 : 0);
    const std::uint32_t box = to + piece_ / kLinePieces * kBoxBytes;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const bool wanted = inside && places_[i] != kNoRow;
      copy_piece(piece_of_box(box, line_ + i * kStep, piece_ % kLinePieces),
                 from + std::uint64_t{wanted ? places_[i] : 0} * tokens_.stride, wanted);
    }
    // The next block's are on their way while a stage is waited for.
    if constexpr (!kAlongK) find_sources(tile, (k + 1) * kBlock);
  }

 private:
  static constexpr bool kAlongK = !Variant::kIsWeightGradient;
  static constexpr int kElements = 8;                           // of a piece
  static constexpr int kLinePieces = 8;                         // 128 bytes
  static constexpr int kRowPieces = kAlongK ? 8 : 16;           // of a row of a stage
  static constexpr int kOfThread = 1024 / Variant::kReaders;    // pieces
  static constexpr int kStep = Variant::kReaders / kRowPieces;  // rows between them
  static constexpr std::uint32_t kNoRow = ~0U;

  // Of the rows from this one of the group on.
  __device__ __forceinline__ void find_sources(const Tile& tile, int first) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int row = first + line_ + i * kStep;
      places_[i] = kNoRow;
      if (!tile.idle && row < tile.rows) {
        places_[i] = static_cast<std::uint32_t>(tokens_.sources[tile.first_row + row]);
      }
    }
  }
  __device__ __forceinline__ void find_tokens() {
#pragma unroll
    for (std::uint32_t& place : places_) {
      if (place != kNoRow) place = tokens_.top_k.divide(place);
    }
  }

  const Tokens& tokens_;
  const int line_;   // the first of this thread's
  const int piece_;  // in it
  // Of each row: its source, and then its token.
  std::uint32_t places_[kOfThread];
};

}  // namespace switchyard::cuda::hopper
