// SPDX-License-Identifier: Apache-2.0
// Shared by the gate's products on Hopper. One warp loads operands into a ring of stages by TMA,
// and two consumer warpgroups multiply them with wgmma.
#pragma once

#include <cstdint>

#include "device/cuda/hopper/kernel_args.h"
#include "device/cuda/hopper/ptx.cuh"
#include "device/cuda/hopper/wgmma.cuh"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda::hopper::gate {

// True if these kernels multiply bf16 tokens by a bf16 gate. Alignment does not matter: operands
// that TMA cannot address are copied.
inline bool fits(const Context& context, std::int64_t hidden) {
  return context.uses_hopper_kernels() && hidden % 8 == 0 && hidden >= kBoxColumns;
}

inline int tiles_over(std::int64_t size, int tile) {
  return static_cast<int>((size + tile - 1) / tile);
}

constexpr int kLineBytes = 128;
constexpr int kBoxBytes = 64 * kLineBytes;  // 64 lines
constexpr int kStagesAlignment = 1024;      // required by the 128-byte swizzle
constexpr int kConsumerThreads = kConsumers * kWarpgroup;
constexpr int kThreads = kConsumerThreads + kWarpgroup;  // registers move between warpgroups
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
// As in Variant: a block that asks for more registers than its launch gave it would wait forever.
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
              kThreads / kWarpgroup * (65536 / kThreads / 8 * 8));
constexpr int kBothConsumersBarrier = 1;

__device__ __forceinline__ std::uint32_t aligned_stages() {
  extern __shared__ std::uint8_t gate_stages[];
  return (shared_address(gate_stages) + kStagesAlignment - 1) & ~(kStagesAlignment - 1U);
}

// A thread's position in a ring of stages. A stage is full when its bytes have arrived, and empty
// when the consumers have released it.
template <int kStages>
class Ring {
 public:
  static constexpr int kBarrierBytes = kStages * 16;

  __device__ __forceinline__ explicit Ring(std::uint32_t barriers) : barriers_(barriers) {}

  // Called by one thread of the block.
  __device__ __forceinline__ void init(int releases) const {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(full(stage), 1);
      init_barrier(empty(stage), releases);
    }
  }

  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ std::uint32_t full() const { return full(stage_); }
  __device__ __forceinline__ std::uint32_t empty() const { return empty(stage_); }
  __device__ __forceinline__ void wait_full() const { wait_for(full(), phase_); }
  __device__ __forceinline__ void wait_empty() const { wait_for(empty(stage_), phase_ ^ 1); }
  // Waits until the consumers have released what this pass put into the stage.
  __device__ __forceinline__ void wait_released() const { wait_for(empty(stage_), phase_); }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // Called by all threads of a consumer. The first arrives.
  __device__ __forceinline__ void release(int stage, int thread) const {
    if (thread == 0) arrive(empty(stage));
  }
  __device__ __forceinline__ void release_previous(int thread) const {
    release(stage_ == 0 ? kStages - 1 : stage_ - 1, thread);
  }
  // Releases this stage in both blocks of a pair, because each block loads for both. The first two
  // threads signal one block each.
  __device__ __forceinline__ void release_to_pair(int thread) const {
    if (thread < 2) arrive_at(empty(stage_), thread);
  }

 private:
  __device__ __forceinline__ std::uint32_t full(int stage) const { return barriers_ + stage * 16; }
  __device__ __forceinline__ std::uint32_t empty(int stage) const { return full(stage) + 8; }

  std::uint32_t barriers_;
  int stage_ = 0;
  std::uint32_t phase_ = 0;
};

// A kernel whose blocks work in pairs, and share one operand. Its Shape has the layout of a stage.
template <typename Shape>
class PairedBlock {
 public:
  using StageRing = Ring<Shape::kStages>;
  static constexpr int kBarriersOffset = Shape::kStages * Shape::kStageBytes;
  static constexpr int kSharedBytes =
      kBarriersOffset + StageRing::kBarrierBytes + Shape::kExtraBytes + kStagesAlignment;
  static_assert(kSharedBytes <= 232448);

  __device__ __forceinline__ PairedBlock() : base_(aligned_stages()) {
    if (threadIdx.x == 0) {
      ring().init(kConsumers * 2);
      fence_barrier_init();
    }
    sync_cluster();
    let_next_launch();
    wait_for_kernels_before();
  }
  // The other block may still copy into this block's shared memory or arrive at its barriers.
  __device__ __forceinline__ void finish() const {
    __syncwarp();
    sync_cluster();
  }

  __device__ __forceinline__ StageRing ring() const { return StageRing(base_ + kBarriersOffset); }
  __device__ __forceinline__ std::uint32_t stage(int index) const {
    return base_ + index * Shape::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t extra() const {
    return base_ + kBarriersOffset + StageRing::kBarrierBytes;
  }

 private:
  std::uint32_t base_;
};

// Sums over 32 of k, by tensor cores. Starts from zero.
template <typename Shape, int kHalf>
__device__ __forceinline__ void start_part(float (&part)[Shape::kSums], std::uint32_t stage,
                                           int consumer) {
  constexpr int kSlices = kBlock / kSlice / 2;
  fence_sums(part);
#pragma unroll
  for (int i = kHalf * kSlices; i < (kHalf + 1) * kSlices; ++i) {
    const auto b = describe<Shape::kB>(stage + Shape::b_offset(consumer));
#pragma unroll
    for (int term = 0; term < Shape::kTerms; ++term) {
      const auto a = describe<Shape::kA>(stage + Shape::a_offset(consumer, term));
      const bool continues = i > kHalf * kSlices || term > 0;
      multiply<Shape::kA, Shape::kB>(part, a + i * kNextSlice<Shape::kA>,
                                     b + i * kNextSlice<Shape::kB>, continues ? 1 : 0);
    }
  }
  commit_products();
}

template <int kCount>
__device__ __forceinline__ void add_part(float (&sums)[kCount], const float (&part)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += part[i];
}

// Multiplies `blocks` stages. Tensor cores truncate when they add, so they only make sums over 32
// of k, which are added here in order. While one consumer adds, the other keeps the tensor cores
// busy. prepare(stage) is called before a stage is multiplied.
template <typename Shape, typename Prepare>
__device__ __forceinline__ void multiply_in_parts(float (&sums)[Shape::kSums],
                                                  const PairedBlock<Shape>& block, int consumer,
                                                  int blocks, const Prepare& prepare) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  auto ring = block.ring();
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    float even[Shape::kSums];
    float odd[Shape::kSums];
    const std::uint32_t stage = block.stage(ring.stage());
    ring.wait_full();
    prepare(ring.stage());
    start_part<Shape, 0>(even, stage, consumer);
    start_part<Shape, 1>(odd, stage, consumer);
    wait_for_products<1>();
    pin(even);
    add_part(sums, even);
    wait_for_products<0>();
    pin(odd);
    ring.release_to_pair(thread);
    add_part(sums, odd);
    ring.advance();
  }
}

// Calls visit(row, column, sums at this and the next column) for the pairs of a warpgroup's 64
// rows.
template <int kCount, typename Visit>
__device__ __forceinline__ void for_each_sums(const float (&sums)[kCount], Visit visit) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    visit(thread / 32 * 16 + i % 2 * 8 + thread % 32 / 4, i / 2 * 8 + thread % 4 * 2,
          make_float2(sums[2 * i], sums[2 * i + 1]));
  }
}

}  // namespace switchyard::cuda::hopper::gate
