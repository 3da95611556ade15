// SPDX-License-Identifier: Apache-2.0
// The direct epilogue: stores sums straight from registers. Used to accumulate, to write f32, or
// where TMA cannot address the output.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "device/cuda/hopper/target.cuh"

namespace switchyard::cuda::hopper {

__device__ __forceinline__ void store_element(float* to, float value, bool accumulate) {
  *to = accumulate ? *to + value : value;
}
__device__ __forceinline__ void store_element(__nv_bfloat16* to, float value, bool accumulate) {
  *to = __float2bfloat16_rn(accumulate ? __bfloat162float(*to) + value : value);
}
__device__ __forceinline__ void store_pair(float* to, float2 value, bool accumulate) {
  auto* pair = reinterpret_cast<float2*>(to);
  if (accumulate) {
    const float2 old = *pair;
    value = {old.x + value.x, old.y + value.y};
  }
  *pair = value;
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* to, float2 value, bool accumulate) {
  auto* pair = reinterpret_cast<__nv_bfloat162*>(to);
  if (accumulate) {
    const float2 old = __bfloat1622float2(*pair);
    value = {old.x + value.x, old.y + value.y};
  }
  *pair = __float22bfloat162_rn(value);
}

template <typename Variant, typename Element>
class DirectStore {
 public:
  __device__ __forceinline__ DirectStore(const KernelArgs& args, const Target& target)
      : args_(args), target_(target) {
    if constexpr (Variant::kIsWeightGradient) {
      const int matrix = target.part * args.groups + target.group;
      c_ = static_cast<Element*>(args.c_matrices[matrix].data);
      stride_ = args.c_matrices[matrix].row_stride;
    } else {
      c_ = static_cast<Element*>(const_cast<void*>(args.c_rows.data)) +
           static_cast<std::int64_t>(target.part) * args.columns;
      stride_ = args.c_rows.stride;
    }
  }

  // `sum(i)` returns the thread's i-th sum.
  template <typename Sum>
  __device__ __forceinline__ void run(int thread, const Sum& sum) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_half = thread / 32 * 16 + thread % 32 / 4 + half * 8;
      if (in_half >= target_.rows) continue;
      const std::int64_t row = target_.row + in_half;
#pragma unroll
      for (int i = 0; i < kTileColumns / 8; ++i) {
        const int column = target_.column + i * 8 + thread % 4 * 2;
        if (column >= args_.columns) continue;
        store(row, column, {sum(4 * i + 2 * half), sum(4 * i + 2 * half + 1)});
      }
    }
    __syncwarp();
  }

 private:
  // Sizes are multiples of eight, so if one element of a pair exists, so does the other.
  __device__ __forceinline__ void store(std::int64_t row, int column, float2 value) const {
    if constexpr (Variant::kIsTransposed) {
      Element* const to = c_ + column * stride_ + row;
      store_element(to, value.x, args_.accumulate);
      store_element(to + stride_, value.y, args_.accumulate);
    } else {
      Element* const to = c_ + row * stride_ + column;
      if (args_.c_has_pairs) return store_pair(to, value, args_.accumulate);
      store_element(to, value.x, args_.accumulate);
      store_element(to + 1, value.y, args_.accumulate);
    }
  }

  const KernelArgs& args_;
  const Target target_;
  Element* c_;
  std::int64_t stride_;
};

template <typename Variant, typename Sum>
__device__ __forceinline__ void store_directly(const KernelArgs& args, const Target& target,
                                               int thread, const Sum& sum) {
  if (Variant::kIsWeightGradient && args.c_is_f32) {
    DirectStore<Variant, float>(args, target).run(thread, sum);
  } else {
    DirectStore<Variant, __nv_bfloat16>(args, target).run(thread, sum);
  }
}

}  // namespace switchyard::cuda::hopper
