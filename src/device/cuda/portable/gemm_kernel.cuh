// SPDX-License-Identifier: Apache-2.0
// The kernel behind all portable products: loops over the tiles that a problem describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>

#include "device/cuda/portable/gemm_bf16.cuh"
#include "device/cuda/portable/gemm_f32.cuh"
#include "device/cuda/portable/gemm_tile.cuh"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda::gemm {

constexpr int kBlocksPerMultiprocessor = 2;

// Problem::find(index, walk, tile) describes the tile at an index, or returns false past the last.
template <typename Multiplier, typename Problem>
__global__ void __launch_bounds__(Multiplier::kThreads, kBlocksPerMultiprocessor)
    multiply_tiles(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto* staged = reinterpret_cast<float*>(memory);
  // Sums take nearly all registers, so the description of the tile stays in shared memory.
  auto& tile =
      *reinterpret_cast<Tile<typename Multiplier::Element>*>(memory + Multiplier::kSharedBytes);
  typename Problem::Walk walk;
  for (int index = static_cast<int>(blockIdx.x);; index += static_cast<int>(gridDim.x)) {
    Tile<typename Multiplier::Element> found;
    if (!problem.find(index, walk, found)) return;
    if (found.rows == 0) continue;
    if (threadIdx.x == 0) tile = found;
    __syncthreads();
    Multiplier multiplier;
    multiplier.multiply(tile, memory);
    __syncthreads();  // the ring is no longer read
    multiplier.stage(staged);
    __syncthreads();
    store_tile<Multiplier::kThreads>(tile, staged);
    __syncthreads();
  }
}

template <typename Multiplier, typename Problem>
void launch_tiles(const Problem& problem, std::int64_t num_blocks, Context& context) {
  constexpr int kBytes =
      Multiplier::kSharedBytes + static_cast<int>(sizeof(Tile<typename Multiplier::Element>));
  const auto kernel = multiply_tiles<Multiplier, Problem>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "the shared memory of multiply_tiles");
  kernel<<<static_cast<unsigned>(num_blocks), Multiplier::kThreads, kBytes, context.stream()>>>(
      problem);
  check(cudaGetLastError(), "multiply_tiles");
}

// kAKMajor and kBKMajor give the layout of the operands. `aligned` changes how they are read, not
// what is computed.
template <bool kAKMajor, bool kBKMajor, typename Problem>
void launch(const Problem& problem, bool aligned, std::int64_t num_blocks, Context& context) {
  if (num_blocks <= 0) return;
  if constexpr (std::is_same_v<typename Problem::Element, float>) {
    launch_tiles<FmaTile<kAKMajor, kBKMajor>>(problem, num_blocks, context);
  } else if (aligned) {
    launch_tiles<TensorCoreTile<kAKMajor, kBKMajor, true>>(problem, num_blocks, context);
  } else {
    launch_tiles<TensorCoreTile<kAKMajor, kBKMajor, false>>(problem, num_blocks, context);
  }
}

// True if all rows begin on a 16-byte boundary.
inline bool is_aligned(const void* data, std::int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}
inline bool are_aligned(std::span<const MatrixRef> refs, std::int64_t element_bytes) {
  return std::all_of(refs.begin(), refs.end(), [&](const MatrixRef& ref) {
    return is_aligned(ref.data, ref.row_stride * element_bytes);
  });
}
inline std::int64_t num_tiles(std::int64_t extent, int tile) { return (extent + tile - 1) / tile; }

}  // namespace switchyard::cuda::gemm
