// SPDX-License-Identifier: Apache-2.0
// The grouped products as tile problems, for groups whose row counts only the device knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/cuda/grouped_gemm.h"
#include "device/cuda/portable/gemm_kernel.cuh"
#include "device/cuda/portable/gemm_walk.cuh"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda::gemm {

struct GroupTable {
  const std::int32_t* row_offsets;
  const std::int32_t* group_rows;
  int count;

  explicit GroupTable(const Groups& groups)
      : row_offsets(groups.row_offsets), group_rows(groups.group_rows), count(groups.count) {}
};

// Returns the number of blocks that fill the GPU, or fewer if there cannot be that many tiles.
inline std::int64_t persistent_blocks(const Groups& groups, std::int64_t column_tiles,
                                      const Context& context) {
  const auto row_blocks = groups.row_capacity / kTileRows + groups.count;
  return std::min<std::int64_t>(row_blocks * column_tiles,
                                kBlocksPerMultiprocessor * context.num_multiprocessors());
}

template <typename T>
struct ForwardTiles {
  using Element = T;
  using Walk = GroupWalk;

  ForwardTiles(const ForwardGemm& args, Context& context)
      : groups(args.groups),
        a(static_cast<const T*>(args.a.data)),
        a_stride(args.a.stride),
        b(context.table(args.b.refs)),
        parts(args.b.parts),
        n(static_cast<int>(args.b.rows)),
        k(static_cast<int>(args.b.columns)),
        c(static_cast<T*>(const_cast<void*>(args.c.data))),
        c_stride(args.c.stride),
        c_is_aligned(is_aligned(args.c.data, args.c.stride * sizeof(T)) &&
                     (args.b.parts == 1 || args.b.rows * sizeof(T) % 16 == 0)),
        bias(args.bias.empty() ? nullptr : context.table(args.bias)),
        factors(args.bias_factors.data) {}

  __device__ bool find(int index, Walk& walk, Tile<T>& tile) const {
    const int tiles_a_part = tiles_over(n, kTileColumns);
    const int column_tiles = parts * tiles_a_part;
    TileInGroup at;
    if (!walk.find(index, groups.group_rows, groups.count, column_tiles, at)) return false;
    const int rows = groups.group_rows[at.group];
    const auto place = place_of(at.index, tiles_over(rows, kTileRows), column_tiles);
    const int part = place.column_tile / tiles_a_part;
    const int column = (place.column_tile - part * tiles_a_part) * kTileColumns;
    const int row_in_group = place.row_block * kTileRows;
    const std::int64_t row = std::int64_t{groups.row_offsets[at.group]} + row_in_group;
    const int matrix = part * groups.count + at.group;
    tile.rows = min(rows - row_in_group, kTileRows);
    tile.columns = min(n - column, kTileColumns);
    tile.k = k;
    tile.a = a + row * a_stride;
    tile.a_stride = a_stride;
    tile.b_stride = b[matrix].row_stride;
    tile.b = static_cast<const T*>(b[matrix].data) + column * tile.b_stride;
    tile.c = c + row * c_stride + std::int64_t{part} * n + column;
    tile.c_stride = c_stride;
    tile.c_is_aligned = c_is_aligned;
    const auto* group_bias = bias == nullptr ? nullptr : static_cast<const T*>(bias[matrix].data);
    tile.bias = group_bias == nullptr ? nullptr : group_bias + column;
    tile.factors = factors == nullptr ? nullptr : factors + row;
    return true;
  }

  GroupTable groups;
  const T* a;
  std::int64_t a_stride;
  const MatrixRef* b;
  int parts;
  int n;
  int k;
  T* c;
  std::int64_t c_stride;
  bool c_is_aligned;
  const MatrixRef* bias;
  const float* factors;
};

template <typename T>
struct InputGradientTiles {
  using Element = T;
  using Walk = GroupWalk;

  InputGradientTiles(const InputGradientGemm& args, Context& context)
      : groups(args.groups),
        a(static_cast<const T*>(args.a.data)),
        a_stride(args.a.stride),
        b(context.table(args.b.refs)),
        parts(args.b.parts),
        n(static_cast<int>(args.b.columns)),
        k(static_cast<int>(args.b.rows)),
        c(static_cast<T*>(const_cast<void*>(args.c.data))),
        c_stride(args.c.stride),
        c_is_aligned(is_aligned(args.c.data, args.c.stride * sizeof(T))) {}

  __device__ bool find(int index, Walk& walk, Tile<T>& tile) const {
    const int column_tiles = tiles_over(n, kTileColumns);
    TileInGroup at;
    if (!walk.find(index, groups.group_rows, groups.count, column_tiles, at)) return false;
    const int rows = groups.group_rows[at.group];
    const auto place = place_of(at.index, tiles_over(rows, kTileRows), column_tiles);
    const int column = place.column_tile * kTileColumns;
    const int row_in_group = place.row_block * kTileRows;
    const std::int64_t row = std::int64_t{groups.row_offsets[at.group]} + row_in_group;
    const MatrixRef first = b[at.group];
    tile.rows = min(rows - row_in_group, kTileRows);
    tile.columns = min(n - column, kTileColumns);
    tile.k = k;
    tile.a = a + row * a_stride;
    tile.a_stride = a_stride;
    tile.b = static_cast<const T*>(first.data) + column;
    tile.b_stride = first.row_stride;
    tile.has_next = parts > 1;
    if (tile.has_next) {
      const MatrixRef second = b[groups.count + at.group];
      tile.next_a = tile.a + k;
      tile.next_b = static_cast<const T*>(second.data) + column;
      tile.next_b_stride = second.row_stride;
    }
    tile.c = c + row * c_stride + column;
    tile.c_stride = c_stride;
    tile.c_is_aligned = c_is_aligned;
    return true;
  }

  GroupTable groups;
  const T* a;
  std::int64_t a_stride;
  const MatrixRef* b;
  int parts;
  int n;
  int k;
  T* c;
  std::int64_t c_stride;
  bool c_is_aligned;
};

// The tiles follow from the matrix sizes alone: rows are the reduction dimension.
template <typename T>
struct WeightGradientTiles {
  using Element = T;
  using Walk = NoWalk;

  WeightGradientTiles(const WeightGradientGemm& args, Context& context)
      : groups(args.groups),
        a(static_cast<const T*>(args.a.data)),
        a_stride(args.a.stride),
        b(static_cast<const T*>(args.b.data)),
        b_stride(args.b.stride),
        c(context.table(args.c.refs)),
        parts(args.c.parts),
        m(static_cast<int>(args.c.rows)),
        n(static_cast<int>(args.c.columns)),
        c_is_f32(args.c_dtype == Dtype::f32),
        c_is_aligned(are_aligned(args.c.refs, size_of(args.c_dtype))),
        accumulate(args.accumulate) {}

  __device__ bool find(int index, Walk& /*walk*/, Tile<T>& tile) const {
    const int blocks_a_part = tiles_over(m, kTileRows);
    const int column_tiles = tiles_over(n, kTileColumns);
    const int group = index / (parts * blocks_a_part * column_tiles);
    if (group >= groups.count) return false;
    const auto place = place_of(index - group * parts * blocks_a_part * column_tiles,
                                parts * blocks_a_part, column_tiles);
    const int part = place.row_block / blocks_a_part;
    const int row = (place.row_block - part * blocks_a_part) * kTileRows;
    const int column = place.column_tile * kTileColumns;
    const std::int64_t first = groups.row_offsets[group];
    const MatrixRef matrix = c[part * groups.count + group];
    tile.k = groups.group_rows[group];
    tile.rows = accumulate && tile.k == 0 ? 0 : min(m - row, kTileRows);
    tile.columns = min(n - column, kTileColumns);
    tile.a = a + first * a_stride + std::int64_t{part} * m + row;
    tile.a_stride = a_stride;
    tile.b = b + first * b_stride + column;
    tile.b_stride = b_stride;
    const std::int64_t place_in_c = row * matrix.row_stride + column;
    tile.c = static_cast<char*>(matrix.data) + place_in_c * (c_is_f32 ? 4 : sizeof(T));
    tile.c_stride = matrix.row_stride;
    tile.c_is_f32 = c_is_f32;
    tile.c_is_aligned = c_is_aligned;
    tile.accumulate = accumulate;
    return true;
  }

  GroupTable groups;
  const T* a;
  std::int64_t a_stride;
  const T* b;
  std::int64_t b_stride;
  const MatrixRef* c;
  int parts;
  int m;
  int n;
  bool c_is_f32;
  bool c_is_aligned;
  bool accumulate;
};

}  // namespace switchyard::cuda::gemm
