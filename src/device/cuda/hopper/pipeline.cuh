// Shared memory of a block, and the stages that travel from its producer to its consumers.
#pragma once

#include "device/cuda/hopper/kernel_args.h"
#include "device/cuda/hopper/ptx.cuh"

namespace switchyard::cuda::hopper {

constexpr int kStages = 4;
constexpr int kConsumers = 2;  // warpgroups, of 64 rows of the tile each
constexpr int kWarpgroup = 128;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;

// A box of 64 lines of 128 bytes: half of A, a quarter of B, or 64 × 64 results on their way out.
constexpr int kBoxBytes = 64 * 128;
constexpr int kABytes = 2 * kBoxBytes;
constexpr int kBBytes = 4 * kBoxBytes;
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kStagingBoxes = 2;  // a consumer

constexpr int kStagingOffset = kStages * kStageBytes;
constexpr int kBarriersOffset = kStagingOffset + kConsumers * kStagingBoxes * kBoxBytes;
constexpr int kSharedAlignment = 1024;  // of the swizzle
constexpr int kSharedBytes = kBarriersOffset + kStages * 16 + kSharedAlignment;
static_assert(kSharedBytes <= 232448);

// A thread's place in the ring of stages. A stage is full when its bytes have come, and empty when
// both consumers of both blocks of the cluster, which may copy into it, are done with it.
class Pipeline {
 public:
  __device__ __forceinline__ explicit Pipeline(std::uint32_t shared) : shared_(shared) {}

  // By one thread, before the cluster synchronises.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(full(stage), 1);
      init_barrier(empty(stage), kConsumers * 2);
    }
    fence_barrier_init();
  }

  __device__ __forceinline__ std::uint32_t a() const { return shared_ + stage_ * kStageBytes; }
  __device__ __forceinline__ std::uint32_t b() const { return a() + kABytes; }
  __device__ __forceinline__ std::uint32_t full() const { return full(stage_); }
  __device__ __forceinline__ std::uint32_t staging(int consumer, int box) const {
    return shared_ + kStagingOffset + (consumer * kStagingBoxes + box) * kBoxBytes;
  }

  __device__ __forceinline__ void wait_full() const { wait_for(full(stage_), phase_); }
  __device__ __forceinline__ void wait_empty() const { wait_for(empty(stage_), phase_ ^ 1); }

  // By all threads of a consumer, whose first two tell the two blocks.
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
  __device__ __forceinline__ std::uint32_t full(int stage) const {
    return shared_ + kBarriersOffset + stage * 8;
  }
  __device__ __forceinline__ std::uint32_t empty(int stage) const {
    return full(stage) + kStages * 8;
  }
  __device__ __forceinline__ void release(int stage, int thread) const {
    if (thread < 2) arrive_at(empty(stage), thread);
  }

  std::uint32_t shared_;
  int stage_ = 0;
  std::uint32_t phase_ = 0;
};

}  // namespace switchyard::cuda::hopper
