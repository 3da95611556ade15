// SPDX-License-Identifier: Apache-2.0
// The gate's logits on Hopper. A pair of blocks takes two tiles of tokens and shares the experts.
#pragma once

#include "device/cuda/early_launch.cuh"
#include "device/cuda/hopper/aligned_copies.h"
#include "device/cuda/route/route_wgmma.cuh"

namespace switchyard::cuda::hopper::gate {

constexpr int kTileTokens = 128;

// Both operands run along k. The bits of a sum do not depend on kExperts.
template <int kExpertsOf>
struct LogitsShape {
  static constexpr int kExperts = kExpertsOf;
  static constexpr int kTerms = 1;
  static constexpr Lines kA = Lines::along_k;
  static constexpr Lines kB = Lines::along_k;
  static constexpr int kSums = kExperts * 64 / kWarpgroup;
  static constexpr int kABytes = kTileTokens * kLineBytes;
  static constexpr int kStageBytes = kABytes + kExperts * kLineBytes;
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  static constexpr int kExtraBytes = 0;

  static __device__ constexpr int a_offset(int consumer, int /*term*/) {
    return consumer * kBoxBytes;
  }
  static __device__ constexpr int b_offset(int /*consumer*/) { return kABytes; }
};

template <typename Store>
struct LogitsArgs {
  CUtensorMap x{};     // [T, H], boxes of 128 tokens
  CUtensorMap gate{};  // [E, H], boxes of half a tile's experts
  int k_blocks = 0;
  int expert_tiles = 0;
  int num_tokens = 0;
  int num_experts = 0;
  Store store;
};

// Run by one thread.
template <typename Shape, typename Store>
__device__ __forceinline__ void load_logits(const LogitsArgs<Store>& args,
                                            const PairedBlock<Shape>& block, int first_token,
                                            int first_expert, int rank) {
  auto ring = block.ring();
  const int half = rank * Shape::kExperts / 2;
  for (int k = 0; k < args.k_blocks; ++k) {
    const std::uint32_t stage = block.stage(ring.stage());
    ring.wait_empty();
    arrive_expecting(ring.full(), Shape::kStageBytes);
    load_box(&args.x, {k * kBlock, first_token, 0, 0}, stage, ring.full());
    load_box_for_both(&args.gate, {k * kBlock, first_expert + half, 0, 0},
                      stage + Shape::kABytes + half * kLineBytes, ring.full());
    ring.advance();
  }
}

// Stores each pair of logits with store.pair(). A tile may lie past the last token: its tokens are
// zeros, and its block still loads experts for the other.
template <typename Shape, typename Store>
__global__ void __launch_bounds__(kThreads, 1)
    logits_kernel(const __grid_constant__ LogitsArgs<Store> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const PairedBlock<Shape> block;
  const int rank = static_cast<int>(rank_in_cluster());
  const int pair = static_cast<int>(blockIdx.x) / 2;
  const int first_expert = pair % args.expert_tiles * Shape::kExperts;
  const int first_token = (pair / args.expert_tiles * 2 + rank) * kTileTokens;
  const int consumer = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (consumer < kConsumers) {
    take_registers<kConsumerRegisters>();
    float sums[Shape::kSums] = {};
    multiply_in_parts(sums, block, consumer, args.k_blocks, [](int) {});
    for_each_sums(sums, [&](int row, int column, float2 logits) {
      const int token = first_token + consumer * 64 + row;
      const int expert = first_expert + column;
      if (token >= args.num_tokens || expert >= args.num_experts) return;
      args.store.pair(token, expert, logits, expert + 1 < args.num_experts);
    });
  } else {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) load_logits(args, block, first_token, first_expert, rank);
  }
  block.finish();
#else
  __trap();
#endif
}

template <typename Shape, typename Store>
void launch_in_pairs(const ConstTensorView& x, const ConstTensorView& gate, const Store& store,
                     Context& context) {
  const auto hidden = x.shape()[1];
  AlignedCopies copies(context);
  const Rows tokens = copies.of(Rows{x.data(), x.row_stride()}, x.rows(), hidden);
  const Rows experts = copies.of(Rows{gate.data(), gate.row_stride()}, gate.rows(), hidden);
  const LogitsArgs<Store> args{
      .x = tensor_map(
          {.data = tokens.data, .columns = hidden, .rows = x.rows(), .row_stride = tokens.stride},
          kTileTokens),
      .gate = tensor_map({.data = experts.data,
                          .columns = hidden,
                          .rows = gate.rows(),
                          .row_stride = experts.stride},
                         Shape::kExperts / 2),
      .k_blocks = tiles_over(hidden, kBlock),
      .expert_tiles = tiles_over(gate.rows(), Shape::kExperts),
      .num_tokens = static_cast<int>(x.rows()),
      .num_experts = static_cast<int>(gate.rows()),
      .store = store};
  const auto pairs = tiles_over(x.rows(), 2 * kTileTokens) * args.expert_tiles;
  launch_early(logits_kernel<Shape, Store>,
               {.blocks = static_cast<unsigned>(2 * pairs),
                .threads = kThreads,
                .shared_bytes = PairedBlock<Shape>::kSharedBytes,
                .cluster = 2},
               args, "hopper::gate::logits_kernel", context);
}

// Where tiles are few, tiles of 64 experts keep twice as many blocks busy, but they read the tokens
// twice.
template <typename Store>
void logits(const ConstTensorView& x, const ConstTensorView& gate, const Store& store,
            Context& context) {
  const auto tiles = tiles_over(x.rows(), kTileTokens) * tiles_over(gate.rows(), 128);
  if (gate.rows() <= 64 || tiles <= context.num_multiprocessors() / 2) {
    launch_in_pairs<LogitsShape<64>>(x, gate, store, context);
  } else {
    launch_in_pairs<LogitsShape<128>>(x, gate, store, context);
  }
}

}  // namespace switchyard::cuda::hopper::gate
