// The direct epilogue: stores sums straight from registers. Used to accumulate, to add a bias, to
// write f32, or where TMA cannot address the output.
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
    const int matrix = target.part * args.groups + target.group;
    if constexpr (Variant::kIsWeightGradient) {
      c_ = static_cast<Element*>(args.c_matrices[matrix].data);
      stride_ = args.c_matrices[matrix].row_stride;
    } else {
      c_ = static_cast<Element*>(const_cast<void*>(args.c_rows.data)) +
           static_cast<std::int64_t>(target.part) * args.columns;
      stride_ = args.c_rows.stride;
      if (args.bias != nullptr) bias_ = static_cast<__nv_bfloat16*>(args.bias[matrix].data);
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
      const bool scaled = bias_ != nullptr && args_.bias_factors != nullptr;
      const float factor = scaled ? args_.bias_factors[row] : 1.0F;
#pragma unroll
      for (int i = 0; i < kTileColumns / 8; ++i) {
        const int column = target_.column + i * 8 + thread % 4 * 2;
        if (column >= args_.columns) continue;
        const float2 value = {sum(4 * i + 2 * half), sum(4 * i + 2 * half + 1)};
        store(row, column, add_bias(value, factor, column));
      }
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ float2 add_bias(float2 value, float factor, int column) const {
    if (Variant::kProduct != Product::forward || bias_ == nullptr) return value;
    return {value.x + factor * __bfloat162float(bias_[column]),
            value.y + factor * __bfloat162float(bias_[column + 1])};
  }

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
  const __nv_bfloat16* bias_ = nullptr;
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
