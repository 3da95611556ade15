// SPDX-License-Identifier: Apache-2.0
// The main loop of a consumer warpgroup over the k blocks of a tile.
#pragma once

#include "device/cuda/hopper/pipeline.cuh"
#include "device/cuda/hopper/tile_walk.cuh"
#include "device/cuda/hopper/wgmma.cuh"

namespace switchyard::cuda::hopper {

// Named barriers: 1 and 2 synchronise one consumer each, 3 synchronises both.
constexpr int kConsumerBarrier = 1;
constexpr int kBothConsumersBarrier = 3;

template <typename Variant>
class MainLoop {
 public:
  __device__ __forceinline__ MainLoop(SharedMemory shared, int warpgroup)
      : shared(shared), consumer(warpgroup), thread(threadIdx.x % kWarpgroup), pipeline_(shared) {}

  // Issues the products of block k. The caller may do other work before finish(k).
  __device__ __forceinline__ void start(float (&sums)[128], const Tile& tile, int k) {
    wait_full();
    if (Variant::kIsWeightGradient && tile.rows - k * kBlock < kBlock) {
      zero_lines(tile.rows - k * kBlock, kBlock);
    }
    fence_sums(sums);
#pragma unroll
    for (int i = 0; i < kBlock / kSlice; ++i) multiply_slice(sums, i, (k | i) != 0);
    commit_products();
  }

  // Does the same for a block of a weight gradient in which the group has fewer than 64 rows, and
  // leaves out slices without rows.
  __device__ __forceinline__ void start_short(float (&sums)[128], const Tile& tile, int k) {
    const int rows = tile.rows - k * kBlock;
    const int slices = (rows + kSlice - 1) / kSlice;
    wait_full();
    zero_lines(rows, slices * kSlice);
    for (int i = 0; i < slices; ++i) {
      fence_sums(sums);
      multiply_slice(sums, i, (k | i) != 0);
      commit_products();
    }
  }

  // Leaves the products of block k in flight, and releases the stage of the block before.
  __device__ __forceinline__ void finish(int k) {
    wait_for_products<1>();
    if (k > 0) pipeline_.release_previous(thread);
    pipeline_.advance();
  }

  // Waits for all products; the sums are then complete. The tile must have at least one k block.
  __device__ __forceinline__ void finish_all(float (&sums)[128]) {
    wait_for_products<0>();
    pin(sums);
    pipeline_.release_previous(thread);
  }

  // Skips the stages of a tile in which this consumer has no rows. No wgmma keeps its warps in step
  // here: without the barrier, the ring could lap a slow warp.
  __device__ __forceinline__ void pass(const Tile& tile) {
    for (int k = 0; k < tile.k_blocks; ++k) {
      pipeline_.wait_full();
      sync();
      pipeline_.release(thread);
      pipeline_.advance();
    }
  }

  __device__ __forceinline__ void sync() const {
    sync_threads(kConsumerBarrier + consumer, kWarpgroup);
  }
  __device__ __forceinline__ std::uint32_t staging(int box) const {
    return shared.staging(consumer, box);
  }

  const SharedMemory shared;
  const int consumer;
  const int thread;  // within the warpgroup

 private:
  static constexpr Lines kA = Variant::kIsWeightGradient ? Lines::across_k : Lines::along_k;
  static constexpr std::uint64_t kHalfOfB = kBBytes / 2 / 16;  // in units of a descriptor
  static constexpr Lines kB =
      Variant::kProduct == Product::forward ? Lines::along_k : Lines::across_k;

  __device__ __forceinline__ void wait_full() const {
    pipeline_.wait_full();
    if constexpr (Variant::kReadsTokens) fence_async_proxy();  // A was written by cp.async
  }

  __device__ __forceinline__ void multiply_slice(float (&sums)[128], int slice,
                                                 int continues) const {
    const std::uint64_t a =
        describe<kA>(pipeline_.a() + consumer * kBoxBytes) + slice * kNextSlice<kA>;
    const std::uint64_t b = describe<kB>(pipeline_.b()) + slice * kNextSlice<kB>;
    if constexpr (Variant::kMultipliesHalves) {
      multiply_half<kA, kB, 0>(sums, a, b, continues);
      multiply_half<kA, kB, 64>(sums, a, b + kHalfOfB, continues);
    } else {
      multiply<kA, kB>(sums, a, b, continues);
    }
  }

  // Zeroes rows past the end of the group, which may hold anything, in both operands. The swizzle
  // permutes pieces within a line, so whole lines can be zeroed without regard to it.
  __device__ __forceinline__ void zero_lines(int first, int last) {
    constexpr int kPieces = 128 / 16;
    const int pieces = (last - first) * kPieces;
    const std::uint32_t boxes[3] = {pipeline_.a() + consumer * kBoxBytes,
                                    pipeline_.b() + consumer * 2 * kBoxBytes,
                                    pipeline_.b() + (consumer * 2 + 1) * kBoxBytes};
    for (int i = thread; i < pieces; i += kWarpgroup) {
#pragma unroll
      for (const std::uint32_t box : boxes) zero_shared(box + first * 128 + i * 16);
    }
    __syncwarp();
    fence_async_proxy();
    sync_threads(kBothConsumersBarrier, kConsumers * kWarpgroup);
  }

  Pipeline pipeline_;
};

}  // namespace switchyard::cuda::hopper
