// The grouped GEMM kernel of Hopper: one block a multiprocessor, clusters of two; in each block one
// thread copies, and two warpgroups multiply 64 rows of the tile each.
#pragma once

#include <type_traits>

#include "device/cuda/hopper/epilogue.cuh"
#include "device/cuda/hopper/main_loop.cuh"
#include "device/cuda/hopper/producer.cuh"

namespace switchyard::cuda::hopper {

// Weight gradients have all consumers at work in every tile: they meet where rows are zeroed.
template <Product kProduct>
__device__ __forceinline__ bool has_rows(const Tile& tile, int consumer) {
  if (kProduct == Product::weight_gradient) return !tile.idle;
  return !tile.idle && tile.row_block * kTileRows + consumer * 64 < tile.rows;
}

template <Product kProduct>
__device__ __forceinline__ void consume_deferred(const KernelArgs& args, int rank,
                                                 MainLoop<kProduct> loop) {
  constexpr int kChunks = DeferredTile<kProduct>::kChunks;
  float sums[128];
  DeferredTile<kProduct> last;
  TileWalk<kProduct> walk(args, rank);
  Tile tile;
  while (walk.next(tile)) {
    if (!has_rows<kProduct>(tile, loop.consumer)) {
      loop.pass(tile);
      continue;
    }
    const Target target = find_target<kProduct>(args, tile, loop.consumer);
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
      if (kProduct == Product::weight_gradient && tile.k_blocks == 0) {
        last.keep_zeros(target);
        continue;
      }
    }
    for (; k < tile.k_blocks; ++k) {
      loop.start(sums, tile, k);
      loop.finish(k);
    }
    loop.finish_all();
    last.keep(sums, target);
  }
  last.store(args, loop);
  wait_for_stores();
}

template <Product kProduct, typename Element>
__device__ __forceinline__ void consume_directly(const KernelArgs& args, int rank,
                                                 MainLoop<kProduct> loop) {
  float sums[128];
  TileWalk<kProduct> walk(args, rank);
  Tile tile;
  while (walk.next(tile)) {
    if (!has_rows<kProduct>(tile, loop.consumer)) {
      loop.pass(tile);
      continue;
    }
    const DirectStore<kProduct, Element> store(args, tile, loop.consumer);
    if (kProduct == Product::weight_gradient && tile.k_blocks == 0) {
      if (!args.accumulate) store.run(loop.thread, [](int) { return 0.0F; });
      continue;
    }
    for (int k = 0; k < tile.k_blocks; ++k) {
      loop.start(sums, tile, k);
      loop.finish(k);
    }
    loop.finish_all();
    store.run(loop.thread, [&](int i) { return sums[i]; });
  }
}

template <Product kProduct, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ KernelArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // As measured: a consumer holds 128 sums, and 64 pairs of the tile before.
  constexpr int kProducerRegisters = 40;
  constexpr int kConsumerRegisters = 232;
  extern __shared__ std::uint8_t unaligned[];
  const std::uint32_t shared =
      (shared_address(unaligned) + kSharedAlignment - 1) & ~(kSharedAlignment - 1U);
  const int warpgroup = __shfl_sync(~0U, threadIdx.x / kWarpgroup, 0);
  const int rank = static_cast<int>(rank_in_cluster());
  if (threadIdx.x == 0) Pipeline(shared).init();
  sync_cluster();
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kWarpgroup) {
      Producer<kProduct>(args, rank).run(Pipeline(shared));
    }
  } else {
    take_registers<kConsumerRegisters>();
    const MainLoop<kProduct> loop(shared, warpgroup);
    if constexpr (kEpilogue == Epilogue::deferred) {
      consume_deferred<kProduct>(args, rank, loop);
    } else {
      using Element = std::conditional_t<kEpilogue == Epilogue::direct_f32, float, __nv_bfloat16>;
      consume_directly<kProduct, Element>(args, rank, loop);
    }
  }
  // The other block may still copy into this one's memory, or tell its barriers.
  __syncwarp();
  sync_cluster();
#else
  __trap();
#endif
}

template <Product kProduct, Epilogue kEpilogue>
void launch(const KernelArgs& args, const Context& context) {
  const auto kernel = grouped_gemm_kernel<kProduct, kEpilogue>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "cudaFuncSetAttribute");
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(context.num_multiprocessors() / 2 * 2));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = context.stream();
  config.attrs = &cluster;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args), "hopper::grouped_gemm_kernel");
}

}  // namespace switchyard::cuda::hopper
