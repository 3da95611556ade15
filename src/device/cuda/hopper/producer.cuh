// One thread that copies the operands of every tile into shared memory.
#pragma once

#include "device/cuda/hopper/pipeline.cuh"
#include "device/cuda/hopper/tile_walk.cuh"

namespace switchyard::cuda::hopper {

// A matrix of a group, as its map and where it lies in that.
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

template <Product kProduct>
class Producer {
 public:
  __device__ __forceinline__ Producer(const KernelArgs& args, int rank)
      : args_(args), rank_(rank) {}

  __device__ __forceinline__ void run(Pipeline pipeline) {
    TileWalk<kProduct> walk(args_, rank_);
    Tile tile;
    while (walk.next(tile)) {
      if (kProduct != Product::weight_gradient && args_.b.table != nullptr) acquire_maps(tile);
      for (int k = 0; k < tile.k_blocks; ++k) {
        pipeline.wait_empty();
        load(tile, k, pipeline);
        pipeline.advance();
      }
    }
  }

 private:
  // Of what the two blocks share each copies one half, for both.
  __device__ __forceinline__ void load(const Tile& tile, int k, const Pipeline& pipeline) {
    arrive_expecting(pipeline.full(), tile.idle ? kABytes : kStageBytes);
    if (tile.same_rows) {
      load_a<true>(tile, k, rank_, pipeline);
      if (tile.idle) return;
      load_b<false>(tile, k, 0, pipeline);
      load_b<false>(tile, k, 1, pipeline);
    } else {
      load_a<false>(tile, k, 0, pipeline);
      load_a<false>(tile, k, 1, pipeline);
      load_b<true>(tile, k, rank_, pipeline);
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

  // 64 of the tile's 128 rows.
  template <bool kForBoth>
  __device__ __forceinline__ void load_a(const Tile& tile, int k, int half,
                                         const Pipeline& pipeline) {
    const int in_tile = half * 64;
    Corner from{};
    if constexpr (kProduct == Product::weight_gradient) {
      const PartBlock m = split_parts(tile.row_block, args_.part_blocks);
      from = {m.block * kTileRows + in_tile, tile.first_row + k * kBlock, 0, m.part};
    } else if constexpr (kProduct == Product::input_gradient) {
      const PartBlock in = split_parts(k, args_.part_blocks);
      from = {in.block * kBlock, tile.first_row + tile.row_block * kTileRows + in_tile, 0, in.part};
    } else {
      from = {k * kBlock, tile.first_row + tile.row_block * kTileRows + in_tile, 0, 0};
    }
    copy<kForBoth>(&args_.a, from, pipeline.a() + half * kBoxBytes, pipeline.full());
  }

  // 128 of the tile's 256 columns: one box of 128 lines along k, or two of 64 across.
  template <bool kForBoth>
  __device__ __forceinline__ void load_b(const Tile& tile, int k, int half,
                                         const Pipeline& pipeline) {
    const std::uint32_t to = pipeline.b() + half * 2 * kBoxBytes;
    if constexpr (kProduct == Product::forward) {
      const PartBlock n = split_parts(tile.column_block, args_.part_blocks);
      const MappedMatrix b = find_matrix(args_.b, args_.groups, tile.group, n.part);
      const Corner from = {k * kBlock, n.block * kTileColumns + half * 128, b.group, b.part};
      copy<kForBoth>(b.map, from, to, pipeline.full());
    } else {
      Corner from = {tile.column_block * kTileColumns + half * 128, tile.first_row + k * kBlock, 0,
                     0};
      const CUtensorMap* map = &args_.b.whole;
      if constexpr (kProduct == Product::input_gradient) {
        const PartBlock in = split_parts(k, args_.part_blocks);
        const MappedMatrix b = find_matrix(args_.b, args_.groups, tile.group, in.part);
        map = b.map;
        from = {from.column, in.block * kBlock, b.group, b.part};
      }
      copy<kForBoth>(map, from, to, pipeline.full());
      from.column += kBoxColumns;
      copy<kForBoth>(map, from, to + kBoxBytes, pipeline.full());
    }
  }

  __device__ __forceinline__ void acquire_maps(const Tile& tile) {
    if (tile.idle) return;
    if constexpr (kProduct == Product::forward) {
      const int part = split_parts(tile.column_block, args_.part_blocks).part;
      acquire_map(args_.b.table + part * args_.groups + tile.group);
    } else {
      const int parts = args_.k_blocks / args_.part_blocks;
      for (int part = 0; part < parts; ++part) {
        acquire_map(args_.b.table + part * args_.groups + tile.group);
      }
    }
  }

  const KernelArgs& args_;
  int rank_;
};

}  // namespace switchyard::cuda::hopper
