// SPDX-License-Identifier: Apache-2.0
// Shared memory layout of a block: the pipeline stages from producer to consumers, the staging
// boxes from consumers to the finisher, and the queue of tiles.
#pragma once

#include "device/cuda/hopper/kernel_args.h"
#include "device/cuda/hopper/ptx.cuh"

namespace switchyard::cuda::hopper {

constexpr int kStages = 4;

// A box of 64 lines of 128 bytes: half of A, a quarter of B, or 64 × 64 results to be stored.
constexpr int kBoxBytes = 64 * 128;
constexpr int kABytes = 2 * kBoxBytes;
constexpr int kBBytes = 4 * kBoxBytes;
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kStagingBoxes = 2;  // per consumer

constexpr int kStagingOffset = kStages * kStageBytes;
constexpr int kQueueOffset = kStagingOffset + kConsumers * kStagingBoxes * kBoxBytes;
constexpr int kQueuedTiles = 8;
constexpr int kQueuedTileBytes = 32;
constexpr int kWalkOffset = kQueueOffset + kQueuedTiles * kQueuedTileBytes;
constexpr int kBarriersOffset = kWalkOffset + 32;
constexpr int kNumBarriers = 2 * kStages + 2 * kConsumers + 2 * kQueuedTiles;
constexpr int kSharedAlignment = 1024;  // required by the 128-byte swizzle
constexpr int kSharedBytes = kBarriersOffset + kNumBarriers * 8 + kSharedAlignment;
static_assert(kSharedBytes <= 232448);

// Addresses of the buffers and barriers in a block's shared memory.
class SharedMemory {
 public:
  __device__ __forceinline__ explicit SharedMemory(std::uint32_t base) : base_(base) {}

  __device__ __forceinline__ std::uint32_t a(int stage) const {
    return base_ + stage * kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t b(int stage) const { return a(stage) + kABytes; }
  __device__ __forceinline__ std::uint32_t staging(int consumer, int box) const {
    return base_ + kStagingOffset + (consumer * kStagingBoxes + box) * kBoxBytes;
  }
  // A stage is full when its bytes have arrived. It is empty when the consumers of both blocks in
  // the cluster have released it, because a producer may multicast into both blocks.
  __device__ __forceinline__ std::uint32_t full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ std::uint32_t empty(int stage) const {
    return barrier(kStages + stage);
  }
  // A consumer's staging boxes are filled by the consumer and drained by the finisher.
  __device__ __forceinline__ std::uint32_t filled(int consumer) const {
    return barrier(2 * kStages + consumer);
  }
  __device__ __forceinline__ std::uint32_t drained(int consumer) const {
    return barrier(2 * kStages + kConsumers + consumer);
  }

  __device__ __forceinline__ std::uint32_t queued_tile(int place) const {
    return base_ + kQueueOffset + place * kQueuedTileBytes;
  }
  // 32 bytes, where the announcing warp keeps the state of its walk.
  __device__ __forceinline__ std::uint32_t walk() const { return base_ + kWalkOffset; }
  // `announced` completes when the tile in this place has been written, `taken` when every warp
  // that works on tiles, in both blocks, has read it. Only the first block's `taken` is used.
  __device__ __forceinline__ std::uint32_t announced(int place) const {
    return barrier(2 * kStages + 2 * kConsumers + place);
  }
  __device__ __forceinline__ std::uint32_t taken(int place) const {
    return barrier(2 * kStages + 2 * kConsumers + kQueuedTiles + place);
  }

  // Called by one thread, before the first cluster barrier.
  template <typename Variant>
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(full(stage), Variant::kReadsTokens ? 1 + Variant::kProducers : 1);
      init_barrier(empty(stage), kConsumers * 2);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      init_barrier(filled(consumer), kWarpgroup);
      if (Variant::kHasFinisher) init_barrier(drained(consumer), Variant::kFinishers);
    }
    for (int place = 0; place < kQueuedTiles; ++place) {
      init_barrier(announced(place), 1);
      init_barrier(taken(place), 2 * Variant::kTileWarps);
    }
    fence_barrier_init();
  }

 private:
  __device__ __forceinline__ std::uint32_t barrier(int index) const {
    return base_ + kBarriersOffset + index * 8;
  }

  std::uint32_t base_;
};

// A thread's position in the ring of stages.
class Pipeline {
 public:
  __device__ __forceinline__ explicit Pipeline(SharedMemory shared) : shared_(shared) {}

  __device__ __forceinline__ std::uint32_t a() const { return shared_.a(stage_); }
  __device__ __forceinline__ std::uint32_t b() const { return shared_.b(stage_); }
  __device__ __forceinline__ std::uint32_t full() const { return shared_.full(stage_); }

  __device__ __forceinline__ void wait_full() const { wait_for(full(), phase_); }
  __device__ __forceinline__ void wait_empty() const {
    wait_for(shared_.empty(stage_), phase_ ^ 1);
  }

  // Called by all threads of a consumer; the first two each signal one block of the cluster.
  __device__ __forceinline__ void release(int thread) const { release(stage_, thread); }
  __device__ __forceinline__ void release_previous(int thread) const {
    release(stage_ == 0 ? kStages - 1 : stage_ - 1, thread);
  }

  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void release(int stage, int thread) const {
    if (thread < 2) arrive_at(shared_.empty(stage), thread);
  }

  SharedMemory shared_;
  int stage_ = 0;
  std::uint32_t phase_ = 0;
};

}  // namespace switchyard::cuda::hopper
