// SPDX-License-Identifier: Apache-2.0
// A plain f32 product, for operands that are not all bf16. Tiles are fixed, and k runs in order.
#pragma once

#include <cstdint>

#include "device/cuda/portable/gemm_tile.cuh"
#include "device/cuda/route/route_operands.cuh"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

constexpr int kSimtTile = 64;
constexpr int kSimtDepth = 16;
constexpr int kSimtThreads = 256;
constexpr int kSimtPitch = kSimtTile + 4;

// Loads a tile [kSimtDepth][kSimtPitch] of a factor, from row `first` and from `k_first` on.
// Elements past `count` or `k_last`, or with a `keeps` of 0, become 0.
template <typename F>
__device__ void stage_factor(float* tile, const F& factor, std::int64_t first, std::int64_t count,
                             std::int64_t k_first, std::int64_t k_last, const std::int32_t* keeps) {
#pragma unroll
  for (int n = 0; n < kSimtTile * kSimtDepth / kSimtThreads; ++n) {
    const int index = n * kSimtThreads + static_cast<int>(threadIdx.x);
    const bool along = F::kRuns == Runs::along_k;
    const int k = along ? index % kSimtDepth : index / kSimtTile;
    const int i = along ? index / kSimtDepth : index % kSimtTile;
    const bool is_there =
        first + i < count && k_first + k < k_last && (keeps == nullptr || keeps[k_first + k] != 0);
    tile[k * kSimtPitch + i] = is_there ? gemm::to_f32(*factor.at(first + i, k_first + k)) : 0.0F;
  }
}

// Calls store(m, n, Σ_k a(m, k) · b(n, k)), where k runs over part blockIdx.z.
template <typename A, typename B, typename Store>
__global__ __launch_bounds__(kSimtThreads) void simt_product(A a, B b, ProductSizes sizes,
                                                             Store store) {
  __shared__ __align__(16) float a_tile[kSimtDepth * kSimtPitch];
  __shared__ __align__(16) float b_tile[kSimtDepth * kSimtPitch];
  const std::int64_t first_m = std::int64_t{blockIdx.x} * kSimtTile;
  const std::int64_t first_n = std::int64_t{blockIdx.y} * kSimtTile;
  const std::int64_t k_first = blockIdx.z * sizes.k_part;
  const std::int64_t k_last = min(k_first + sizes.k_part, sizes.k);
  const int my_m = static_cast<int>(threadIdx.x) / 16 * 4;
  const int my_n = static_cast<int>(threadIdx.x) % 16 * 4;
  float sums[4][4] = {};
  for (std::int64_t k = k_first; k < k_last; k += kSimtDepth) {
    stage_factor(a_tile, a, first_m, sizes.m, k, k_last, nullptr);
    stage_factor(b_tile, b, first_n, sizes.n, k, k_last, sizes.keeps);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kSimtDepth; ++j) {
      const float4 x = *reinterpret_cast<const float4*>(a_tile + j * kSimtPitch + my_m);
      const float4 y = *reinterpret_cast<const float4*>(b_tile + j * kSimtPitch + my_n);
      const float xs[4] = {x.x, x.y, x.z, x.w};
      const float ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[r][c] += xs[r] * ys[c];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const std::int64_t m = first_m + my_m + r;
      const std::int64_t n = first_n + my_n + c;
      if (m < sizes.m && n < sizes.n) store(m, n, sums[r][c]);
    }
  }
}

// Splits k into `parts`, each a sum of its own.
template <typename A, typename B, typename Store>
void launch_simt_product(A a, B b, const ProductSizes& sizes, unsigned parts, Store store,
                         Context& context) {
  const auto tiles = [](std::int64_t n) {
    return static_cast<unsigned>((n + kSimtTile - 1) / kSimtTile);
  };
  const dim3 grid(tiles(sizes.m), tiles(sizes.n), parts);
  if (grid.x == 0 || grid.y == 0) return;
  simt_product<<<grid, kSimtThreads, 0, context.stream()>>>(a, b, sizes, store);
  check(cudaGetLastError(), "simt_product");
}

}  // namespace switchyard::cuda
