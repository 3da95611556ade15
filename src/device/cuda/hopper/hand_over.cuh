// SPDX-License-Identifier: Apache-2.0
// Hands a consumer's rounded sums to the finisher, two of a tile's four chunks at a time.
#pragma once

#include "device/cuda/hopper/boxes.cuh"
#include "device/cuda/hopper/pipeline.cuh"

namespace switchyard::cuda::hopper {

// Returns the chunk that goes into a staging box. In an activating tile, a half consists of half
// the gate columns and the same up columns; otherwise it is half of the tile's columns.
template <typename Variant>
__device__ constexpr int chunk_of(int half, int box) {
  return Variant::kActivates ? 2 * box + half : 2 * half + box;
}

// The first half is handed over at the end of a tile. The second, if there is one, waits in
// registers until the middle of the next tile, when the finisher should have room for it.
template <typename Variant>
class HandOver {
 public:
  __device__ __forceinline__ HandOver(SharedMemory shared, int consumer, int thread)
      : shared_(shared), consumer_(consumer), thread_(thread) {}

  __device__ __forceinline__ void end_tile(const float (&sums)[128], bool has_second_half) {
    wait_until_drained();
#pragma unroll
    for (int box = 0; box < kStagingBoxes; ++box) {
      std::uint32_t pairs[kChunkPairs];
      round_chunk(sums, chunk_of<Variant>(0, box), pairs);
      store_chunk(shared_.staging(consumer_, box), thread_, pairs);
    }
    tell();
#pragma unroll
    for (int box = 0; box < kStagingBoxes; ++box) {
      round_chunk(sums, chunk_of<Variant>(1, box), pairs_[box]);
    }
    pending_ = has_second_half;
  }

  // Hands over the second half if it is pending. Called before a tile without rows too: if the
  // finisher had to wait for the next tile with rows, all other warps could be stuck behind it.
  __device__ __forceinline__ void flush() {
    if (!pending_) return;
    pending_ = false;
    wait_until_drained();
#pragma unroll
    for (int box = 0; box < kStagingBoxes; ++box) {
      store_chunk(shared_.staging(consumer_, box), thread_, pairs_[box]);
    }
    tell();
  }

 private:
  // `chunk` must be a constant after inlining: registers cannot be indexed at run time.
  __device__ __forceinline__ static void round_chunk(const float (&sums)[128], int chunk,
                                                     std::uint32_t (&pairs)[kChunkPairs]) {
#pragma unroll
    for (int i = 0; i < kChunkPairs; ++i) {
      const int first = 2 * (chunk * kChunkPairs + i);
      pairs[i] = round_pair(sums[first], sums[first + 1]);
    }
  }
  __device__ __forceinline__ void wait_until_drained() const {
    wait_for(shared_.drained(consumer_), phase_ ^ 1);
  }
  __device__ __forceinline__ void tell() {
    fence_async_proxy();  // the finisher's TMA stores read the boxes
    arrive(shared_.filled(consumer_));
    phase_ ^= 1;
  }

  SharedMemory shared_;
  const int consumer_;
  const int thread_;
  std::uint32_t phase_ = 0;
  bool pending_ = false;
  std::uint32_t pairs_[kStagingBoxes][kChunkPairs];
};

}  // namespace switchyard::cuda::hopper
