// SPDX-License-Identifier: Apache-2.0
// The Hopper grouped GEMM kernel: persistent and warp-specialised, one block per SM, clusters of
// two. In each block one to four warps produce, two consumer warpgroups multiply 64 rows of the
// tile each, and with a fused epilogue three or six warps run the finisher.
#pragma once

#include "device/cuda/early_launch.cuh"
#include "device/cuda/hopper/deferred_epilogue.cuh"
#include "device/cuda/hopper/direct_epilogue.cuh"
#include "device/cuda/hopper/fused_epilogue.cuh"
#include "device/cuda/hopper/main_loop.cuh"
#include "device/cuda/hopper/producer.cuh"
#include "device/cuda/hopper/tile_bias.cuh"

namespace switchyard::cuda::hopper {

// Multiplies the k blocks of a tile from `k` on, and adds the bias.
template <typename Variant>
__device__ __forceinline__ void complete(float (&sums)[128], const KernelArgs& args,
                                         const Tile& tile, const Target& target,
                                         MainLoop<Variant>& loop, int k) {
  // The first kChunks blocks are never short: some run while the last tile is stored and others
  // do not, and both ways must give a zero the same sign.
  const bool may_be_short = Variant::kIsWeightGradient && tile.k_blocks > kChunks;
  const int whole = may_be_short ? tile.rows / kBlock : tile.k_blocks;
  for (; k < whole; ++k) {
    loop.start(sums, tile, k);
    loop.finish(k);
  }
  if (Variant::kIsWeightGradient && k < tile.k_blocks) {
    loop.start_short(sums, tile, k);
    loop.finish(k);
  }
  loop.finish_all(sums);
  add_bias<Variant>(sums, args, target, loop.thread);
}

template <typename Variant>
__device__ __forceinline__ void consume_deferred(const KernelArgs& args, int rank,
                                                 MainLoop<Variant> loop) {
  float sums[128];
  DeferredTile<Variant> last;
  Tiles<Variant> tiles(args, rank, loop.shared);
  Tile tile;
  while (tiles.next(tile)) {
    if (!has_rows<Variant>(tile, loop.consumer)) {
      loop.pass(tile);
      continue;
    }
    loop.begin(args, tile);
    const Target target = find_target<Variant>(args, tile, loop.consumer);
    int k = 0;
    if (last.pending() && tile.k_blocks >= kChunks) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        loop.start(sums, tile, chunk);
        last.store_chunk(args, loop, chunk);
        loop.finish(chunk);
      }
      k = kChunks;
    } else {
      last.store(args, loop);
      if (Variant::kIsWeightGradient && tile.k_blocks == 0) {
        last.keep_zeros(target);
        continue;
      }
    }
    complete(sums, args, tile, target, loop, k);
    last.keep(sums, target);
  }
  last.store(args, loop);
  wait_for_stores();
}

template <typename Variant>
__device__ __forceinline__ void consume_directly(const KernelArgs& args, int rank,
                                                 MainLoop<Variant> loop) {
  float sums[128];
  Tiles<Variant> tiles(args, rank, loop.shared);
  Tile tile;
  while (tiles.next(tile)) {
    if (!has_rows<Variant>(tile, loop.consumer)) {
      loop.pass(tile);
      continue;
    }
    loop.begin(args, tile);
    const Target target = find_target<Variant>(args, tile, loop.consumer);
    if (Variant::kIsWeightGradient && tile.k_blocks == 0) {
      if (args.accumulate) continue;
      store_directly<Variant>(args, target, loop.thread, [](int) { return 0.0F; });
      continue;
    }
    complete(sums, args, tile, target, loop, 0);
    store_directly<Variant>(args, target, loop.thread, [&](int i) { return sums[i]; });
  }
}

// Hands the sums to the finisher instead of storing them.
template <typename Variant>
__device__ __forceinline__ void consume_for_finisher(const KernelArgs& args, int rank,
                                                     MainLoop<Variant> loop) {
  float sums[128];
  HandOver<Variant> last(loop.shared, loop.consumer, loop.thread);
  Tiles<Variant> tiles(args, rank, loop.shared);
  Tile tile;
  while (tiles.next(tile)) {
    if (!has_rows<Variant>(tile, loop.consumer)) {
      last.flush();
      loop.pass(tile);
      continue;
    }
    loop.begin(args, tile);
    const int middle = tile.k_blocks / 2;
    for (int k = 0; k < middle; ++k) {
      loop.start(sums, tile, k);
      loop.finish(k);
    }
    loop.start(sums, tile, middle);
    last.flush();
    loop.finish(middle);
    const Target target = find_target<Variant>(args, tile, loop.consumer);
    complete(sums, args, tile, target, loop, middle + 1);
    last.end_tile(sums, has_right_half<Variant>(args, tile));
  }
  last.flush();
}

template <typename Variant>
__device__ __forceinline__ void consume(const KernelArgs& args, int rank,
                                        const MainLoop<Variant>& loop) {
  if constexpr (Variant::kHasFinisher) {
    consume_for_finisher<Variant>(args, rank, loop);
  } else if constexpr (Variant::kEpilogue == Epilogue::deferred) {
    consume_deferred<Variant>(args, rank, loop);
  } else {
    consume_directly<Variant>(args, rank, loop);
  }
}

template <typename Variant>
__device__ __forceinline__ void produce(const KernelArgs& args, int rank, SharedMemory shared,
                                        int thread) {
  Producer<Variant> producer(args, rank, shared);
  if constexpr (Variant::kReadsTokens) {
    producer.run_reading_tokens(thread);
  } else {
    if (__shfl_sync(~0U, thread, 0) < 32) producer.run();
  }
}

template <typename Variant>
__device__ __forceinline__ void finish(const KernelArgs& args, int rank, SharedMemory shared) {
  Finisher<Variant> finisher(args, rank, shared);
  if (args.activations.is_clamped) {
    finisher.template run<ClampedSwiglu<FastMath>>();
  } else {
    finisher.template run<Swiglu<FastMath>>();
  }
}

template <typename Variant>
__global__ void __launch_bounds__(Variant::kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ KernelArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::uint8_t unaligned[];
  const SharedMemory shared((shared_address(unaligned) + kSharedAlignment - 1) &
                            ~(kSharedAlignment - 1U));
  const int warpgroup = __shfl_sync(~0U, threadIdx.x / kWarpgroup, 0);
  const int rank = static_cast<int>(rank_in_cluster());
  if (threadIdx.x == 0) shared.init_barriers<Variant>();
  if (threadIdx.x == 32) Producer<Variant>::prefetch_maps(args);
  sync_cluster();
  let_next_launch();
  wait_for_kernels_before();
  if (warpgroup < kConsumers) {
    take_registers<Variant::kConsumerRegisters>();
    consume<Variant>(args, rank, MainLoop<Variant>(shared, warpgroup));
  } else {
    give_registers<Variant::kOtherRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - kConsumers * kWarpgroup;
    if (__shfl_sync(~0U, thread, 0) < Variant::kProducers) {
      produce<Variant>(args, rank, shared, thread);
    } else if constexpr (Variant::kHasFinisher) {
      finish<Variant>(args, rank, shared);
    }
  }
  // The other block may still copy into this block's shared memory or arrive at its barriers.
  __syncwarp();
  sync_cluster();
#else
  __trap();
#endif
}

template <typename Variant>
void launch(const KernelArgs& args, const Context& context) {
  launch_early(grouped_gemm_kernel<Variant>,
               {.blocks = static_cast<unsigned>(context.num_multiprocessors() / 2 * 2),
                .threads = Variant::kThreads,
                .shared_bytes = kSharedBytes,
                .cluster = 2},
               args, "hopper::grouped_gemm_kernel", context);
}

}  // namespace switchyard::cuda::hopper
