// SPDX-License-Identifier: Apache-2.0
// Partial sums of the gate's gradient, d_logitsᵀ · x, on Hopper. A pair of blocks takes two tiles
// of columns over the same tokens, and shares their d_logits.
#pragma once

#include "device/cuda/early_launch.cuh"
#include "device/cuda/hopper/aligned_copies.h"
#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_wgmma.cuh"

namespace switchyard::cuda::hopper::gate {

// Both operands run across k, which is the tokens. The consumers halve a tile by experts, or, where
// it has only 64, by columns.
template <int kExpertsOf>
struct GradientShape {
  static constexpr int kExperts = kExpertsOf;
  static constexpr int kColumns = 128 * 128 / kExperts;
  static constexpr bool kHalvesColumns = kExperts == 64;
  static constexpr int kTerms = 2;
  static constexpr Lines kA = Lines::across_k;
  static constexpr Lines kB = Lines::across_k;
  static constexpr int kSums = 64;
  static constexpr int kTermBytes = kExperts / kBoxColumns * kBoxBytes;
  static constexpr int kColumnBoxes = kColumns / kBoxColumns;
  static constexpr int kStageBytes = kTerms * kTermBytes + kColumnBoxes * kBoxBytes;
  static constexpr int kStages = 4;
  static constexpr int kExtraBytes = kStages * 8;  // see kept_tokens()

  static __device__ constexpr int a_offset(int consumer, int term) {
    return term * kTermBytes + (kHalvesColumns ? 0 : consumer * kBoxBytes);
  }
  static __device__ constexpr int b_offset(int consumer) {
    return kTerms * kTermBytes + (kHalvesColumns ? consumer * 2 * kBoxBytes : 0);
  }
};

struct GradientSizes {
  int num_tokens = 0;
  int part_tokens = 0;  // a multiple of kBlock
  int num_experts = 0;
  int columns = 0;
};

template <typename Partials>
struct GradientArgs {
  CUtensorMap terms[2] = {};               // main and rest [T, E], boxes of 64 tokens
  CUtensorMap x{};                         // [T, H], boxes of 64 tokens
  const std::int32_t* has_part = nullptr;  // [T]
  GradientSizes sizes;
  int expert_tiles = 0;
  int column_pairs = 0;  // pairs of tiles
  Partials partials;
};

// The tile of one block, and the part of the tokens that it sums over.
struct GradientTile {
  unsigned part = 0;
  int first_token = 0;
  int blocks = 0;  // of 64 tokens
  int expert = 0;
  int column = 0;
};
template <typename Shape, typename Partials>
__device__ __forceinline__ GradientTile find_tile(const GradientArgs<Partials>& args, int rank) {
  const auto pair = static_cast<int>(blockIdx.x) / 2;
  const int strip = pair / args.expert_tiles;
  GradientTile tile;
  tile.part = static_cast<unsigned>(strip / args.column_pairs);
  tile.first_token = static_cast<int>(tile.part) * args.sizes.part_tokens;
  const int tokens = min(args.sizes.part_tokens, args.sizes.num_tokens - tile.first_token);
  tile.blocks = (tokens + kBlock - 1) / kBlock;
  tile.expert = pair % args.expert_tiles * Shape::kExperts;
  tile.column = (strip % args.column_pairs * 2 + rank) * Shape::kColumns;
  return tile;
}

// The address of the bits of 32 of a stage's tokens. A token's bit is 0 if its x counts as 0.
__device__ __forceinline__ std::uint32_t kept_tokens(std::uint32_t extra, int stage, int half) {
  return extra + stage * 8 + half * 4;
}

// Zeroes x of tokens that take no part (see GateGradients), because it may hold NaN. A line holds
// one token, and the swizzle only permutes pieces within a line.
template <typename Shape>
__device__ __forceinline__ void drop_tokens(const PairedBlock<Shape>& block, int stage,
                                            int consumer) {
  const std::uint32_t kept[2] = {load_word(kept_tokens(block.extra(), stage, 0)),
                                 load_word(kept_tokens(block.extra(), stage, 1))};
  if ((kept[0] & kept[1]) == ~0U) return;
  constexpr int kPieces = kLineBytes / 16;
  constexpr int kMyBoxes = Shape::kColumnBoxes / kConsumers;
  const std::uint32_t boxes = block.stage(stage) + Shape::kTerms * Shape::kTermBytes;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int i = 0; i < kBlock * kPieces / kWarpgroup; ++i) {
    const int piece = i * kWarpgroup + thread;
    const int token = piece / kPieces;
    if (((token < 32 ? kept[0] : kept[1]) >> token % 32 & 1U) != 0) continue;
#pragma unroll
    for (int box = 0; box < kMyBoxes; ++box) {
      zero_shared(boxes + (consumer * kMyBoxes + box) * kBoxBytes + piece * 16);
    }
  }
  __syncwarp();
  fence_async_proxy();
  sync_threads(kBothConsumersBarrier, kConsumerThreads);
}

// Run by one warp. It reads has_part one stage ahead, to hide the latency.
template <typename Shape, typename Partials>
__device__ __forceinline__ void load_gradient(const GradientArgs<Partials>& args,
                                              const PairedBlock<Shape>& block,
                                              const GradientTile& tile, int rank) {
  auto ring = block.ring();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto is_kept = [&](int token) {
    return token >= args.sizes.num_tokens || args.has_part[token] != 0;
  };
  int token = tile.first_token;
  bool low = is_kept(token + lane);
  bool high = is_kept(token + 32 + lane);
  for (int k = 0; k < tile.blocks; ++k) {
    const unsigned kept_low = __ballot_sync(~0U, low);
    const unsigned kept_high = __ballot_sync(~0U, high);
    ring.wait_empty();
    if (lane == 0) {
      const std::uint32_t stage = block.stage(ring.stage());
      store_word(kept_tokens(block.extra(), ring.stage(), 0), kept_low);
      store_word(kept_tokens(block.extra(), ring.stage(), 1), kept_high);
      arrive_expecting(ring.full(), Shape::kStageBytes);
#pragma unroll
      for (int i = 0; i < Shape::kColumnBoxes; ++i) {
        load_box(&args.x, {tile.column + i * kBoxColumns, token, 0, 0},
                 stage + Shape::kTerms * Shape::kTermBytes + i * kBoxBytes, ring.full());
      }
#pragma unroll
      for (int i = 0; i < Shape::kExperts / kBoxColumns; ++i) {
        load_box_for_both(&args.terms[rank], {tile.expert + i * kBoxColumns, token, 0, 0},
                          stage + rank * Shape::kTermBytes + i * kBoxBytes, ring.full());
      }
    }
    __syncwarp();
    ring.advance();
    token += kBlock;
    low = is_kept(token + lane);
    high = is_kept(token + 32 + lane);
  }
}

// A tile may lie past the last column: its block still loads d_logits for the other.
template <typename Shape, typename Partials>
__global__ void __launch_bounds__(kThreads, 1)
    gradient_kernel(const __grid_constant__ GradientArgs<Partials> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const PairedBlock<Shape> block;
  const int rank = static_cast<int>(rank_in_cluster());
  const GradientTile tile = find_tile<Shape>(args, rank);
  const int consumer = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (consumer < kConsumers) {
    take_registers<kConsumerRegisters>();
    float sums[Shape::kSums] = {};
    multiply_in_parts(sums, block, consumer, tile.blocks,
                      [&](int stage) { drop_tokens(block, stage, consumer); });
    const int first_expert = tile.expert + (Shape::kHalvesColumns ? 0 : consumer * 64);
    const int first_column = tile.column + (Shape::kHalvesColumns ? consumer * 128 : 0);
    for_each_sums(sums, [&](int row, int column, float2 pair) {
      const int expert = first_expert + row;
      if (expert >= args.sizes.num_experts || first_column + column >= args.sizes.columns) return;
      *reinterpret_cast<float2*>(args.partials.at(tile.part, expert, first_column + column)) = pair;
    });
  } else {
    give_registers<kProducerRegisters>();
    if (threadIdx.x < kConsumerThreads + 32) load_gradient(args, block, tile, rank);
  }
  block.finish();
#else
  __trap();
#endif
}

template <typename Shape, typename Partials>
void launch_gradient(const DLogits& d_logits, const Rows& x, const std::int32_t* has_part,
                     const GradientSizes& sizes, const Partials& partials, Context& context) {
  const auto map_of = [&](const Rows& rows, int columns) {
    return tensor_map({.data = rows.data,
                       .columns = columns,
                       .rows = sizes.num_tokens,
                       .row_stride = rows.stride},
                      kBlock);
  };
  const auto term_of = [&](const TensorView& term) {
    return map_of(Rows{term.data(), term.row_stride()}, sizes.num_experts);
  };
  const GradientArgs<Partials> args{.terms = {term_of(d_logits.main), term_of(d_logits.rest)},
                                    .x = map_of(x, sizes.columns),
                                    .has_part = has_part,
                                    .sizes = sizes,
                                    .expert_tiles = tiles_over(sizes.num_experts, Shape::kExperts),
                                    .column_pairs = tiles_over(sizes.columns, 2 * Shape::kColumns),
                                    .partials = partials};
  const int pairs =
      tiles_over(sizes.num_tokens, sizes.part_tokens) * args.column_pairs * args.expert_tiles;
  launch_early(gradient_kernel<Shape, Partials>,
               {.blocks = static_cast<unsigned>(2 * pairs),
                .threads = kThreads,
                .shared_bytes = PairedBlock<Shape>::kSharedBytes,
                .cluster = 2},
               args, "hopper::gate::gradient_kernel", context);
}

}  // namespace switchyard::cuda::hopper::gate
