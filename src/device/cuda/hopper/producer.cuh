// SPDX-License-Identifier: Apache-2.0
// The producer: loads the operands of every tile into the pipeline stages.
#pragma once

#include "device/cuda/hopper/pipeline.cuh"
#include "device/cuda/hopper/target.cuh"
#include "device/cuda/hopper/tile_queue.cuh"
#include "device/cuda/hopper/token_reader.cuh"

namespace switchyard::cuda::hopper {

// A matrix of a group: its tensor map, and its coordinates in that map.
struct MappedMatrix {
  const CUtensorMap* map;
  int group;
  int part;
};
__device__ __forceinline__ MappedMatrix find_matrix(const MatrixMaps& maps, int groups, int group,
                                                    int part) {
  if (maps.table == nullptr) return {&maps.whole, group, part};
  return {maps.table + part * groups + group, 0, 0};
}

template <typename Variant>
class Producer {
 public:
  __device__ __forceinline__ Producer(const KernelArgs& args, int rank, SharedMemory shared)
      : args_(args), rank_(rank), shared_(shared), pipeline_(shared) {}

  // Called by one thread, before the kernels that write the operands have ended.
  __device__ __forceinline__ static void prefetch_maps(const KernelArgs& args) {
    if (!Variant::kReadsTokens) prefetch_map(&args.a);
    if (args.b.table == nullptr) prefetch_map(&args.b.whole);
  }

  // Run by one warp, whose first thread loads all operands by TMA.
  __device__ __forceinline__ void run() {
    Announcer<Variant> announcer(args_, shared_, rank_ == 0);
    Tiles<Variant> tiles(args_, rank_, shared_);
    Tile tile;
    while (tiles.next(tile)) {
      if (lane_of_thread() == 0) load_tile(tile);
      __syncwarp();
      announcer.announce_ahead();
    }
    announcer.end();
  }

  // Run by all readers: every thread copies its pieces of A, and thread 0 also loads B by TMA.
  __device__ __forceinline__ void run_reading_tokens(int thread) {
    Announcer<Variant> announcer(args_, shared_, rank_ == 0 && thread / 32 == 0);
    Tiles<Variant> tiles(args_, rank_, shared_);
    TokenReader<Variant> reader(args_.tokens, thread / 32);
    Tile tile;
    for (bool is_first = true; tiles.next(tile); is_first = false) {
      reader.look_up(tile);
      if (!is_first) announcer.announce_ahead();  // while the look-up waits for memory
      const Halves halves = halves_of(tile);
      if (thread == 0) acquire_maps(tile);
      reader.begin(tile);
      for (int k = 0; k < tile.k_blocks; ++k) {
        pipeline_.wait_empty();
        if (thread == 0) {
          arrive_expecting(pipeline_.full(), halves.b * kBBytes / 2);
          load_b(tile, k, halves);
        }
        if (!tile.idle) reader.copy(k, pipeline_.a());
        arrive_after_copies(pipeline_.full());
        if (!tile.idle) reader.find_next(tile, k);
        pipeline_.advance();
      }
      if (is_first) announcer.announce_ahead();
    }
    announcer.end();
  }

 private:
  static constexpr Product kProduct = Variant::kProduct;

  // How many halves of a tile's operands are loaded: rows that only the second consumer would have,
  // and columns outside of the matrix, are left out.
  struct Halves {
    int a;
    int b;
  };
  __device__ __forceinline__ Halves halves_of(const Tile& tile) const {
    const bool has_b = Variant::kActivates || has_right_half<Variant>(args_, tile);
    return {find_target<Variant>(args_, tile, 1).rows > 0 ? 2 : 1, tile.idle ? 0 : has_b ? 2 : 1};
  }

  __device__ __forceinline__ void load_tile(const Tile& tile) {
    const Halves halves = halves_of(tile);
    acquire_maps(tile);
    for (int k = 0; k < tile.k_blocks; ++k) {
      pipeline_.wait_empty();
      arrive_expecting(pipeline_.full(), halves.a * kABytes / 2 + halves.b * kBBytes / 2);
      load_a(tile, k, halves);
      load_b(tile, k, halves);
      pipeline_.advance();
    }
  }

  // If the two blocks share an operand, each of them loads half of it and multicasts that half to
  // both.
  __device__ __forceinline__ void load_a(const Tile& tile, int k, Halves halves) {
    if (!tile.same_rows) {
      load_half_of_a<false>(tile, k, 0);
      if (halves.a > 1) load_half_of_a<false>(tile, k, 1);
    } else if (rank_ < halves.a) {
      load_half_of_a<true>(tile, k, rank_);
    }
  }
  __device__ __forceinline__ void load_b(const Tile& tile, int k, Halves halves) {
    if (tile.same_rows) {
      if (halves.b > 0) load_half_of_b<false>(tile, k, 0);
      if (halves.b > 1) load_half_of_b<false>(tile, k, 1);
    } else if (rank_ < halves.b) {
      load_half_of_b<true>(tile, k, rank_);
    }
  }

  template <bool kForBoth>
  __device__ __forceinline__ static void copy(const CUtensorMap* map, const Corner& from,
                                              std::uint32_t to, std::uint32_t barrier) {
    if constexpr (kForBoth) {
      load_box_for_both(map, from, to, barrier);
    } else {
      load_box(map, from, to, barrier);
    }
  }

  // Loads 64 of the tile's 128 rows.
  template <bool kForBoth>
  __device__ __forceinline__ void load_half_of_a(const Tile& tile, int k, int half) {
    const int in_tile = half * 64;
    Corner from{};
    if constexpr (Variant::kIsWeightGradient) {
      const PartBlock m = Variant::kIsTransposed ? PartBlock{0, tile.row_block}
                                                 : split_parts(tile.row_block, args_.part_blocks);
      from = {m.block * kTileRows + in_tile, tile.first_row + k * kBlock, 0, m.part};
    } else if constexpr (kProduct == Product::input_gradient) {
      const PartBlock in = split_parts(k, args_.part_blocks);
      from = {in.block * kBlock, tile.first_row + tile.row_block * kTileRows + in_tile, 0, in.part};
    } else {
      from = {k * kBlock, tile.first_row + tile.row_block * kTileRows + in_tile, 0, 0};
    }
    copy<kForBoth>(&args_.a, from, pipeline_.a() + half * kBoxBytes, pipeline_.full());
  }

  // Loads 128 of the tile's 256 columns: one box of 128 lines along k, or two of 64 across k.
  template <bool kForBoth>
  __device__ __forceinline__ void load_half_of_b(const Tile& tile, int k, int half) {
    const std::uint32_t to = pipeline_.b() + half * 2 * kBoxBytes;
    if constexpr (kProduct == Product::forward) {
      const PartBlock n = Variant::kActivates ? PartBlock{half, tile.column_block}
                                              : split_parts(tile.column_block, args_.part_blocks);
      const int in_tile = Variant::kActivates ? 0 : half * 128;
      const MappedMatrix b = find_matrix(args_.b, args_.groups, tile.group, n.part);
      const Corner from = {k * kBlock, n.block * Variant::kColumnsOfPart + in_tile, b.group,
                           b.part};
      copy<kForBoth>(b.map, from, to, pipeline_.full());
    } else {
      MappedMatrix b = {&args_.b.whole, 0, 0};
      PartBlock n = {0, tile.column_block};
      int row = tile.first_row + k * kBlock;
      if constexpr (kProduct == Product::input_gradient) {
        const PartBlock in = split_parts(k, args_.part_blocks);
        b = find_matrix(args_.b, args_.groups, tile.group, in.part);
        row = in.block * kBlock;
      } else if constexpr (Variant::kIsTransposed) {
        n = split_parts(tile.column_block, args_.part_blocks);
        b.part = n.part;
      }
      Corner from = {n.block * kTileColumns + half * 128, row, b.group, b.part};
      copy<kForBoth>(b.map, from, to, pipeline_.full());
      from.column += kBoxColumns;
      copy<kForBoth>(b.map, from, to + kBoxBytes, pipeline_.full());
    }
  }

  __device__ __forceinline__ void acquire_maps(const Tile& tile) {
    if (Variant::kIsWeightGradient || args_.b.table == nullptr || tile.idle) return;
    if constexpr (kProduct == Product::forward && !Variant::kActivates) {
      acquire_map_of(tile.group, split_parts(tile.column_block, args_.part_blocks).part);
    } else {
      const int parts = Variant::kActivates ? 2 : args_.k_blocks / args_.part_blocks;
      for (int part = 0; part < parts; ++part) acquire_map_of(tile.group, part);
    }
  }
  __device__ __forceinline__ void acquire_map_of(int group, int part) {
    acquire_map(args_.b.table + part * args_.groups + group);
  }

  const KernelArgs& args_;
  int rank_;
  const SharedMemory shared_;
  Pipeline pipeline_;
};

}  // namespace switchyard::cuda::hopper
