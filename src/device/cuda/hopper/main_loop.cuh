// SPDX-License-Identifier: Apache-2.0
// The main loop of a consumer warpgroup over the k blocks of a tile.
#pragma once

#include "device/cuda/hopper/pipeline.cuh"
#include "device/cuda/hopper/target.cuh"
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

  // Called before the first block of a tile.
  __device__ __forceinline__ void begin(const KernelArgs& args, const Tile& tile) {
    has_right_half_ = Variant::kActivates || has_right_half<Variant>(args, tile);
  }

  // Issues the products of block k. The caller may do other work before finish(k).
  __device__ __forceinline__ void start(float (&sums)[128], const Tile& tile, int k) {
    const Operands operands = describe_operands();
    wait_full();
    if (Variant::kIsWeightGradient && tile.rows - k * kBlock < kBlock) {
      zero_lines(tile.rows - k * kBlock, kBlock);
    }
    if (has_right_half_) {
      multiply_slices<true, kSlices>(sums, operands, 0, k);
    } else if constexpr (!Variant::kActivates) {
      multiply_slices<false, kSlices>(sums, operands, 0, k);
    }
  }

  // Does the same for a block of a weight gradient in which the group has fewer than 64 rows, and
  // leaves out slices without rows; but not in tiles without a right half, because with products of
  // both widths there are too few registers (C7511).
  __device__ __forceinline__ void start_short(float (&sums)[128], const Tile& tile, int k) {
    if (!has_right_half_) return start(sums, tile, k);
    const int rows = tile.rows - k * kBlock;
    const int slices = (rows + kSlice - 1) / kSlice;
    const Operands operands = describe_operands();
    wait_full();
    zero_lines(rows, slices * kSlice);
    for (int i = 0; i < slices; ++i) {
      multiply_slices<true, 1>(sums, operands, i, k);
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
  static constexpr std::uint32_t kHalfOfB = kBBytes / 2 / 16;  // in units of a descriptor
  static constexpr int kSlices = kBlock / kSlice;
  static constexpr Lines kB =
      Variant::kProduct == Product::forward ? Lines::along_k : Lines::across_k;

  __device__ __forceinline__ void wait_full() const {
    pipeline_.wait_full();
    if constexpr (Variant::kReadsTokens) fence_async_proxy();  // A was written by cp.async
  }

  // Descriptors of the stage's operands.
  struct Operands {
    std::uint64_t a;
    std::uint64_t b;
  };
  __device__ __forceinline__ Operands describe_operands() const {
    return {describe<kA>(pipeline_.a() + consumer * kBoxBytes), describe<kB>(pipeline_.b())};
  }

  // Issues the products of some slices as one group, behind a fence. With one fence before the
  // branch on has_right_half_, ptxas would serialise them (C7520).
  template <bool kHasRightHalf, int kCount>
  __device__ __forceinline__ static void multiply_slices(float (&sums)[128],
                                                         const Operands& operands, int first,
                                                         int k) {
    fence_sums(sums);
#pragma unroll
    for (int i = first; i < first + kCount; ++i) {
      const std::uint64_t a = advance(operands.a, i * kNextSlice<kA>);
      const std::uint64_t b = advance(operands.b, i * kNextSlice<kB>);
      const int continues = (k | i) != 0;
      if constexpr (Variant::kMultipliesHalves || !kHasRightHalf) {
        multiply_half<kA, kB, 0>(sums, a, b, continues);
        if constexpr (kHasRightHalf) {
          multiply_half<kA, kB, 64>(sums, a, advance(b, kHalfOfB), continues);
        }
      } else {
        multiply<kA, kB>(sums, a, b, continues);
      }
    }
    commit_products();
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
  bool has_right_half_ = true;
};

}  // namespace switchyard::cuda::hopper
