// SPDX-License-Identifier: Apache-2.0
// d_x += d_logits · gate on Hopper. The reduction is so short that moving d_x takes longest. One
// warp therefore brings tiles of d_x into staging buffers ahead of time, and stores the results
// from there.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/hopper/boxes.cuh"
#include "device/cuda/route/route_wgmma.cuh"

namespace switchyard::cuda::hopper::gate {

constexpr int kDxTile = 128;                           // tokens, and columns
constexpr int kDxBoxBytes = kDxTile * kLineBytes;      // 128 tokens by 64 of E or of H
constexpr int kDLogitsBytes = 2 * kDxBoxBytes;         // both terms of 128 tokens and 64 experts
constexpr int kGateBytes = 2 * kBoxBytes;              // 64 experts, 128 columns
constexpr int kStagingBytes = 2 * kDxBoxBytes;         // a tile of d_x
constexpr int kDxThreads = kConsumerThreads + 2 * 32;  // with the producer and the mover
constexpr int kProducerThread = kConsumerThreads;
constexpr int kMoverThread = kConsumerThreads + 32;

// How a block divides its shared memory. A slot holds 64 experts. If the slots for d_logits hold
// all experts, d_logits are loaded only once for all tiles of the same tokens.
template <int kDLogitsSlotsOf, int kGateSlotsOf, int kStagingsOf>
struct DxShape {
  static constexpr int kDLogitsSlots = kDLogitsSlotsOf;
  static constexpr int kGateSlots = kGateSlotsOf;
  static constexpr int kStagings = kStagingsOf;
  static constexpr int kGateOffset = kDLogitsSlots * kDLogitsBytes;
  static constexpr int kStagingOffset = kGateOffset + kGateSlots * kGateBytes;
  static constexpr int kBarriersOffset = kStagingOffset + kStagings * kStagingBytes;
  static constexpr int kBarrierBytes = 16 * (kDLogitsSlots + kGateSlots + kStagings);
  static constexpr int kSharedBytes = kBarriersOffset + kBarrierBytes + kStagesAlignment;
  static_assert(kSharedBytes <= 232448);
};

struct DxArgs {
  CUtensorMap main{};  // [T, E], boxes of 128 tokens
  CUtensorMap rest{};  // likewise
  CUtensorMap gate{};  // [E, H], boxes of 64 experts
  CUtensorMap d_x{};   // [T, H], boxes of 128 tokens
  int k_blocks = 0;
  int column_tiles = 0;
  int tiles = 0;
};

template <typename Shape>
class DxBlock {
 public:
  using DLogitsRing = Ring<Shape::kDLogitsSlots>;
  using GateRing = Ring<Shape::kGateSlots>;
  // A staging buffer is full when the old d_x has arrived, and empty when the consumers have
  // replaced it with the new.
  using StagingRing = Ring<Shape::kStagings>;

  __device__ __forceinline__ explicit DxBlock(const DxArgs& args)
      : args_(args),
        base_(aligned_stages()),
        first_(static_cast<int>(std::int64_t{args.tiles} * blockIdx.x / gridDim.x)),
        last_(static_cast<int>(std::int64_t{args.tiles} * (blockIdx.x + 1) / gridDim.x)),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ __forceinline__ void init_barriers() const {
    d_logits_ring().init(kConsumers);
    gate_ring().init(kConsumers);
    staging_ring().init(kConsumerThreads);
    fence_barrier_init();
  }

  // Run by one thread: loads the operands of every tile.
  __device__ __forceinline__ void produce() const {
    auto d_logits = d_logits_ring();
    auto gate = gate_ring();
    for (int tile = first_; tile < last_; ++tile) {
      const int token = tile / args_.column_tiles * kDxTile;
      const int column = tile % args_.column_tiles * kDxTile;
      for (int k = 0; k < args_.k_blocks; ++k) {
        gate.wait_empty();
        arrive_expecting(gate.full(), kGateBytes);
        const std::uint32_t columns = gate_slot(gate.stage());
        load_box(&args_.gate, {column, k * kBlock, 0, 0}, columns, gate.full());
        load_box(&args_.gate, {column + kBoxColumns, k * kBlock, 0, 0}, columns + kBoxBytes,
                 gate.full());
        gate.advance();
        if (!is_new(tile)) continue;
        d_logits.wait_empty();
        arrive_expecting(d_logits.full(), kDLogitsBytes);
        const std::uint32_t terms = d_logits_slot(d_logits.stage());
        load_box(&args_.main, {k * kBlock, token, 0, 0}, terms, d_logits.full());
        load_box(&args_.rest, {k * kBlock, token, 0, 0}, terms + kDxBoxBytes, d_logits.full());
        d_logits.advance();
      }
    }
  }

  // Run by one thread: loads the old d_x, and stores the new.
  __device__ __forceinline__ void move() const {
    auto loading = staging_ring();
    auto storing = staging_ring();
    const int ahead = min(first_ + Shape::kStagings, last_);
    for (int tile = first_; tile < ahead; ++tile) load_old(tile, loading);
    for (int tile = first_; tile < last_; ++tile) {
      storing.wait_released();
      move_boxes(tile, storing.stage(),
                 [&](const Corner& to, std::uint32_t from) { store_box(&args_.d_x, to, from); });
      commit_stores();
      storing.advance();
      if (tile + Shape::kStagings >= last_) continue;
      wait_until_stores_have_read<0>();
      load_old(tile + Shape::kStagings, loading);
    }
    wait_for_stores();
  }

  // Run by a consumer: multiplies 64 tokens of every tile, and adds d_x.
  __device__ __forceinline__ void multiply_tiles(int consumer) const {
    auto d_logits = d_logits_ring();
    auto gate = gate_ring();
    auto staging = staging_ring();
    int first_slot = 0;  // of the tile's d_logits
    for (int tile = first_; tile < last_; ++tile) {
      if (is_new(tile)) first_slot = d_logits.stage();
      const auto slot = [&](int k) { return (first_slot + k) % Shape::kDLogitsSlots; };
      float sums[64];
#pragma unroll 1
      for (int k = 0; k < args_.k_blocks; ++k) {
        if (is_new(tile)) {
          d_logits.wait_full();
          d_logits.advance();
        }
        gate.wait_full();
        start(sums, d_logits_slot(slot(k)) + consumer * kBoxBytes, gate_slot(gate.stage()), k > 0);
        wait_for_products<1>();
        if (k > 0) {
          gate.release_previous(thread_);
          if (!keeps_d_logits()) d_logits.release(slot(k - 1), thread_);
        }
        gate.advance();
      }
      wait_for_products<0>();
      pin(sums);
      gate.release_previous(thread_);
      const int kept = keeps_d_logits() ? 0 : args_.k_blocks - 1;
      if (is_last(tile)) {
        for (int k = kept; k < args_.k_blocks; ++k) d_logits.release(slot(k), thread_);
      }
      staging.wait_full();
      add_to_staging(sums, staging_buffer(staging.stage()) + consumer * kBoxBytes);
      fence_async_proxy();
      arrive(staging.empty());
      staging.advance();
    }
  }

 private:
  __device__ __forceinline__ bool keeps_d_logits() const {
    return args_.k_blocks <= Shape::kDLogitsSlots;
  }
  // True if d_logits are loaded for this tile, not kept from the one before.
  __device__ __forceinline__ bool is_new(int tile) const {
    return !keeps_d_logits() || tile == first_ || tile % args_.column_tiles == 0;
  }
  // True if they are released after this tile.
  __device__ __forceinline__ bool is_last(int tile) const {
    return tile + 1 == last_ || is_new(tile + 1);
  }

  __device__ __forceinline__ void load_old(int tile, StagingRing& ring) const {
    arrive_expecting(ring.full(), kStagingBytes);
    move_boxes(tile, ring.stage(), [&](const Corner& from, std::uint32_t to) {
      load_box(&args_.d_x, from, to, ring.full());
    });
    ring.advance();
  }
  template <typename Move>
  __device__ __forceinline__ void move_boxes(int tile, int buffer, const Move& move) const {
    const int token = tile / args_.column_tiles * kDxTile;
    const int column = tile % args_.column_tiles * kDxTile;
    move(Corner{column, token, 0, 0}, staging_buffer(buffer));
    move(Corner{column + kBoxColumns, token, 0, 0}, staging_buffer(buffer) + kDxBoxBytes);
  }

  __device__ __forceinline__ static void start(float (&sums)[64], std::uint32_t terms,
                                               std::uint32_t columns, bool continues) {
    constexpr Lines kA = Lines::along_k;
    constexpr Lines kB = Lines::across_k;
    const auto main = describe<kA>(terms);
    const auto rest = describe<kA>(terms + kDxBoxBytes);
    const auto b = describe<kB>(columns);
    fence_sums(sums);
#pragma unroll
    for (int i = 0; i < kBlock / kSlice; ++i) {
      multiply<kA, kB>(sums, main + i * kNextSlice<kA>, b + i * kNextSlice<kB>,
                       continues || i > 0 ? 1 : 0);
      multiply<kA, kB>(sums, rest + i * kNextSlice<kA>, b + i * kNextSlice<kB>, 1);
    }
    commit_products();
  }

  // Adds the sums to 64 tokens of a staging buffer. Loads come first, because the compiler moves
  // none past a store.
  __device__ __forceinline__ void add_to_staging(const float (&sums)[64],
                                                 std::uint32_t lines) const {
    const int line = thread_ / 32 * 16 + thread_ % 32 / 4;
    const auto at = [&](int box, int i) {
      return piece_of_box(lines + box * kDxBoxBytes, line + i % 2 * 8, i / 2) + thread_ % 4 * 4;
    };
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      std::uint32_t pairs[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[i] = load_word(at(box, i));
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 old = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pairs[i]));
        const int first = box * 32 + 2 * i;
        store_word(at(box, i), round_pair(old.x + sums[first], old.y + sums[first + 1]));
      }
    }
  }

  __device__ __forceinline__ std::uint32_t d_logits_slot(int slot) const {
    return base_ + slot * kDLogitsBytes;
  }
  __device__ __forceinline__ std::uint32_t gate_slot(int slot) const {
    return base_ + Shape::kGateOffset + slot * kGateBytes;
  }
  __device__ __forceinline__ std::uint32_t staging_buffer(int buffer) const {
    return base_ + Shape::kStagingOffset + buffer * kStagingBytes;
  }
  __device__ __forceinline__ DLogitsRing d_logits_ring() const {
    return DLogitsRing(base_ + Shape::kBarriersOffset);
  }
  __device__ __forceinline__ GateRing gate_ring() const {
    return GateRing(base_ + Shape::kBarriersOffset + DLogitsRing::kBarrierBytes);
  }
  __device__ __forceinline__ StagingRing staging_ring() const {
    return StagingRing(base_ + Shape::kBarriersOffset + DLogitsRing::kBarrierBytes +
                       GateRing::kBarrierBytes);
  }

  const DxArgs& args_;
  std::uint32_t base_;
  int first_;  // tile
  int last_;   // tile, exclusive
  int thread_;
};

template <typename Shape>
__global__ void __launch_bounds__(kDxThreads, 1) d_x_kernel(const __grid_constant__ DxArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const DxBlock<Shape> block(args);
  if (threadIdx.x == 0) block.init_barriers();
  __syncthreads();
  let_next_launch();
  wait_for_kernels_before();
  const int consumer = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (consumer < kConsumers) {
    block.multiply_tiles(consumer);
  } else if (threadIdx.x == kProducerThread) {
    block.produce();
  } else if (threadIdx.x == kMoverThread) {
    block.move();
  }
#else
  __trap();
#endif
}

}  // namespace switchyard::cuda::hopper::gate
