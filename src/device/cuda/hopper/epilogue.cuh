// How a consumer warpgroup's 64 × 256 sums become part of c.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/hopper/main_loop.cuh"
#include "device/cuda/hopper/producer.cuh"

namespace switchyard::cuda::hopper {

// Where they go: rows and columns of c, or of a matrix of it.
struct Target {
  int row;
  int rows;  // that belong to the group or matrix: may be over 64, or none
  int column;
  int group;
  int part;
};

template <Product kProduct>
__device__ __forceinline__ Target find_target(const KernelArgs& args, const Tile& tile,
                                              int consumer) {
  const int in_tile = consumer * 64;
  if constexpr (kProduct == Product::weight_gradient) {
    const PartBlock m = split_parts(tile.row_block, args.part_blocks);
    const int row = m.block * kTileRows + in_tile;
    return {row, args.rows - row, tile.column_block * kTileColumns, tile.group, m.part};
  } else {
    const int row = tile.row_block * kTileRows + in_tile;
    const PartBlock n = kProduct == Product::forward
                            ? split_parts(tile.column_block, args.part_blocks)
                            : PartBlock{0, tile.column_block};
    return {tile.first_row + row, tile.rows - row, n.block * kTileColumns, tile.group, n.part};
  }
}

// Sums that were rounded, and are stored in four chunks of 64 columns while the tensor cores are at
// the next tile.
template <Product kProduct>
class DeferredTile {
 public:
  static constexpr int kChunks = 4;

  __device__ __forceinline__ void keep(const float (&sums)[128], const Target& target) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(sums[2 * i], sums[2 * i + 1]);
      packed_[i] = reinterpret_cast<const std::uint32_t&>(pair);
    }
    target_ = target;
    pending_ = true;
  }
  __device__ __forceinline__ void keep_zeros(const Target& target) {
#pragma unroll
    for (std::uint32_t& pair : packed_) pair = 0;
    target_ = target;
    pending_ = true;
  }
  __device__ __forceinline__ bool pending() const { return pending_; }

  // Called with constants alone: the registers cannot be indexed at run time.
  __device__ __forceinline__ void store_chunk(const KernelArgs& args,
                                              const MainLoop<kProduct>& loop, int chunk) {
    const std::uint32_t box = loop.staging(chunk % kStagingBoxes);
    if (loop.thread == 0) wait_until_stores_have_read<kStagingBoxes - 1>();
    loop.sync();
    stage(box, loop.thread, chunk);
    fence_async_proxy();
    loop.sync();
    const int column = target_.column + chunk * kBoxColumns;
    if (kProduct == Product::weight_gradient || target_.rows >= 64) {
      const bool inside = column < args.columns && target_.rows > 0;
      if (loop.thread == 0 && inside) store_whole(args, box, column);
    } else {
      store_rows(args, box, column, loop.thread);
      __syncwarp();
    }
    if (loop.thread == 0) commit_stores();
  }
  __device__ __forceinline__ void store(const KernelArgs& args, const MainLoop<kProduct>& loop) {
    if (!pending_) return;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) store_chunk(args, loop, chunk);
  }

 private:
  __device__ __forceinline__ void stage(std::uint32_t box, int thread, int chunk) {
    const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int piece = 2 * i + thread % 32 / 16;
      store_matrices(box + row * 128 + ((piece ^ (row & 7)) << 4), packed_ + chunk * 16 + i * 4);
    }
  }

  __device__ __forceinline__ void store_whole(const KernelArgs& args, std::uint32_t box,
                                              int column) const {
    if constexpr (kProduct == Product::weight_gradient) {
      const MappedMatrix c = find_matrix(args.c, args.groups, target_.group, target_.part);
      if (args.c.table != nullptr) acquire_map(c.map);
      store_box(c.map, {column, target_.row, c.group, c.part}, box);
    } else {
      store_box(&args.c.whole, {column, target_.row, 0, target_.part}, box);
    }
  }

  // The rows after these belong to others.
  __device__ __forceinline__ void store_rows(const KernelArgs& args, std::uint32_t box, int column,
                                             int thread) const {
    const int in_piece = column + thread % 8 * 8;
    if (in_piece >= args.columns) return;
    auto* c = static_cast<__nv_bfloat16*>(const_cast<void*>(args.c_rows.data)) +
              static_cast<std::int64_t>(target_.part) * args.columns + in_piece;
    for (int row = thread / 8; row < target_.rows; row += kWarpgroup / 8) {
      const uint4 piece = load_shared(box + row * 128 + ((thread % 8 ^ (row & 7)) << 4));
      *reinterpret_cast<uint4*>(c + (target_.row + row) * args.c_rows.stride) = piece;
    }
  }

  std::uint32_t packed_[64];
  Target target_;
  bool pending_ = false;
};

__device__ __forceinline__ void store_pair(float* to, float2 value, bool accumulate, bool at_once) {
  if (!at_once) {
    to[0] = accumulate ? to[0] + value.x : value.x;
    to[1] = accumulate ? to[1] + value.y : value.y;
    return;
  }
  auto* pair = reinterpret_cast<float2*>(to);
  if (accumulate) {
    const float2 old = *pair;
    value = {old.x + value.x, old.y + value.y};
  }
  *pair = value;
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* to, float2 value, bool accumulate,
                                           bool at_once) {
  if (!at_once) {
    to[0] = __float2bfloat16_rn(accumulate ? __bfloat162float(to[0]) + value.x : value.x);
    to[1] = __float2bfloat16_rn(accumulate ? __bfloat162float(to[1]) + value.y : value.y);
    return;
  }
  auto* pair = reinterpret_cast<__nv_bfloat162*>(to);
  if (accumulate) {
    const float2 old = __bfloat1622float2(*pair);
    value = {old.x + value.x, old.y + value.y};
  }
  *pair = __float22bfloat162_rn(value);
}

// Straight from registers: added to what is there, with a bias, in f32, or to where no bulk copy
// reaches.
template <Product kProduct, typename Element>
class DirectStore {
 public:
  __device__ __forceinline__ DirectStore(const KernelArgs& args, const Tile& tile, int consumer)
      : args_(args), target_(find_target<kProduct>(args, tile, consumer)) {
    const int matrix = target_.part * args.groups + target_.group;
    if constexpr (kProduct == Product::weight_gradient) {
      c_ = static_cast<Element*>(args.c_matrices[matrix].data);
      stride_ = args.c_matrices[matrix].row_stride;
    } else {
      c_ = static_cast<Element*>(const_cast<void*>(args.c_rows.data)) +
           static_cast<std::int64_t>(target_.part) * args.columns;
      stride_ = args.c_rows.stride;
      if (args.bias != nullptr) bias_ = static_cast<__nv_bfloat16*>(args.bias[matrix].data);
    }
  }

  // `sum`: of an index into a thread's sums.
  template <typename Sum>
  __device__ __forceinline__ void run(int thread, const Sum& sum) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_half = thread / 32 * 16 + thread % 32 / 4 + half * 8;
      if (in_half >= target_.rows) continue;
      const std::int64_t row = target_.row + in_half;
      const bool scaled = bias_ != nullptr && args_.bias_factors != nullptr;
      const float factor = scaled ? args_.bias_factors[row] : 1.0F;
      Element* const c = c_ + row * stride_;
#pragma unroll
      for (int i = 0; i < kTileColumns / 8; ++i) {
        const int column = target_.column + i * 8 + thread % 4 * 2;
        if (column >= args_.columns) continue;
        const float2 value = {sum(4 * i + 2 * half), sum(4 * i + 2 * half + 1)};
        store_pair(c + column, add_bias(value, factor, column), args_.accumulate,
                   args_.c_has_pairs);
      }
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ float2 add_bias(float2 value, float factor, int column) const {
    if (kProduct != Product::forward || bias_ == nullptr) return value;
    return {value.x + factor * __bfloat162float(bias_[column]),
            value.y + factor * __bfloat162float(bias_[column + 1])};
  }

  const KernelArgs& args_;
  const Target target_;
  Element* c_;
  std::int64_t stride_;
  const __nv_bfloat16* bias_ = nullptr;
};

}  // namespace switchyard::cuda::hopper
