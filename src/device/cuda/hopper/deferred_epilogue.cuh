// SPDX-License-Identifier: Apache-2.0
// The deferred epilogue: stores a tile's rounded sums in chunks of 64 columns while the tensor
// cores work on the next tile.
#pragma once

#include "device/cuda/hopper/boxes.cuh"
#include "device/cuda/hopper/main_loop.cuh"
#include "device/cuda/hopper/producer.cuh"
#include "device/cuda/hopper/target.cuh"

namespace switchyard::cuda::hopper {

template <typename Variant>
class DeferredTile {
 public:
  __device__ __forceinline__ void keep(const float (&sums)[128], const Target& target) {
#pragma unroll
    for (int i = 0; i < kChunks * kChunkPairs; ++i) {
      pairs_[i / kChunkPairs][i % kChunkPairs] = round_pair(sums[2 * i], sums[2 * i + 1]);
    }
    target_ = target;
    pending_ = true;
  }
  __device__ __forceinline__ void keep_zeros(const Target& target) {
#pragma unroll
    for (auto& chunk : pairs_) {
#pragma unroll
      for (std::uint32_t& pair : chunk) pair = 0;
    }
    target_ = target;
    pending_ = true;
  }
  __device__ __forceinline__ bool pending() const { return pending_; }

  // `chunk` must be a constant after inlining: registers cannot be indexed at run time.
  __device__ __forceinline__ void store_chunk(const KernelArgs& args, const MainLoop<Variant>& loop,
                                              int chunk) {
    const std::uint32_t box = loop.staging(chunk % kStagingBoxes);
    if (loop.thread == 0) wait_until_stores_have_read<kStagingBoxes - 1>();
    loop.sync();
    if constexpr (Variant::kIsTransposed) {
      store_chunk_transposed(box, loop.thread, pairs_[chunk]);
    } else {
      hopper::store_chunk(box, loop.thread, pairs_[chunk]);
    }
    fence_async_proxy();
    loop.sync();
    const int column = target_.column + chunk * kBoxColumns;
    if (Variant::kIsWeightGradient || target_.rows >= 64) {
      const bool inside = column < args.columns && target_.rows > 0;
      if (loop.thread == 0 && inside) store_whole(args, box, column);
    } else {
      store_rows(args, box, column, loop.thread);
      __syncwarp();
    }
    if (loop.thread == 0) commit_stores();
  }
  __device__ __forceinline__ void store(const KernelArgs& args, const MainLoop<Variant>& loop) {
    if (!pending_) return;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) store_chunk(args, loop, chunk);
  }

 private:
  __device__ __forceinline__ void store_whole(const KernelArgs& args, std::uint32_t box,
                                              int column) const {
    if constexpr (Variant::kIsWeightGradient) {
      const MappedMatrix c = find_matrix(args.c, args.groups, target_.group, target_.part);
      if (args.c.table != nullptr) acquire_map(c.map);
      const Corner to = Variant::kIsTransposed ? Corner{target_.row, column, c.group, c.part}
                                               : Corner{column, target_.row, c.group, c.part};
      store_box(c.map, to, box);
    } else {
      store_box(&args.c.whole, {column, target_.row, 0, target_.part}, box);
    }
  }

  // Stores row by row, because rows past the end of the group must not be overwritten.
  __device__ __forceinline__ void store_rows(const KernelArgs& args, std::uint32_t box, int column,
                                             int thread) const {
    const int in_piece = column + thread % 8 * 8;
    if (in_piece >= args.columns) return;
    auto* c = static_cast<__nv_bfloat16*>(const_cast<void*>(args.c_rows.data)) +
              static_cast<std::int64_t>(target_.part) * args.columns + in_piece;
    for (int row = thread / 8; row < target_.rows; row += kWarpgroup / 8) {
      const uint4 piece = load_shared(piece_of_box(box, row, thread % 8));
      *reinterpret_cast<uint4*>(c + (target_.row + row) * args.c_rows.stride) = piece;
    }
  }

  std::uint32_t pairs_[kChunks][kChunkPairs];
  Target target_;
  bool pending_ = false;
};

}  // namespace switchyard::cuda::hopper
