// SPDX-License-Identifier: Apache-2.0
// Sums and prefix sums over the lanes of a warp and the threads of a block.
#pragma once

#include <cstdint>

namespace switchyard::cuda {

constexpr int kWarpLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffU;

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / kWarpLanes; }
__device__ inline int warps_of_block() { return static_cast<int>(blockDim.x) / kWarpLanes; }
__device__ inline unsigned lanes_below(int lane) { return (1U << lane) - 1U; }

template <typename T>
__device__ T warp_sum(T value) {
  for (int d = kWarpLanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(kAllLanes, value, d);
  return value;
}

// Returns the inclusive prefix sum, over this lane and all lower ones.
template <typename T>
__device__ T warp_sum_up_to(T value) {
  const int lane = lane_of_thread();
  for (int d = 1; d < kWarpLanes; d *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, d);
    if (lane >= d) value += below;
  }
  return value;
}

template <typename T>
struct BlockSums {
  T before;  // over all lower threads
  T total;   // over the whole block
};

// Must be called by all threads of a block, which must consist of whole warps. The caller may pass
// the same `shared` [kWarpLanes] to the next call without a barrier.
template <typename T>
__device__ BlockSums<T> block_sums(T value, T* shared) {
  const int lane = lane_of_thread();
  const T in_warp = warp_sum_up_to(value);
  __syncthreads();  // other threads may still be reading `shared` in a previous call
  if (lane == kWarpLanes - 1) shared[warp_of_thread()] = in_warp;
  __syncthreads();
  const T of_warp = lane < warps_of_block() ? shared[lane] : T{0};
  const T warps = warp_sum_up_to(of_warp);
  const T warps_before = __shfl_sync(kAllLanes, warps - of_warp, warp_of_thread());
  return {warps_before + in_warp - value, __shfl_sync(kAllLanes, warps, kWarpLanes - 1)};
}

// Writes the exclusive prefix sums of counts [n], and their total, to offsets [n + 1]. Must be
// called by all threads of a block.
template <typename Sum>
__device__ void block_offsets(const std::int32_t* counts, int n, std::int32_t* offsets,
                              Sum* shared) {
  Sum before_tile = 0;
  for (int first = 0; first < n; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    const auto sums = block_sums<Sum>(i < n ? counts[i] : 0, shared);
    if (i < n) offsets[i] = static_cast<std::int32_t>(before_tile + sums.before);
    before_tile += sums.total;
  }
  if (threadIdx.x == 0) offsets[n] = static_cast<std::int32_t>(before_tile);
}

}  // namespace switchyard::cuda
