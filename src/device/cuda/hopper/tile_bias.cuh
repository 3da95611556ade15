// SPDX-License-Identifier: Apache-2.0
// Adds the bias of a projection to a consumer's sums before they are rounded.
#pragma once

#include "device/cuda/experts/lines.cuh"
#include "device/cuda/hopper/target.cuh"

namespace switchyard::cuda::hopper {

// Returns two adjacent bf16 elements.
__device__ __forceinline__ std::uint32_t load_pair(const std::uint16_t* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % 4 == 0) {
    return __ldg(reinterpret_cast<const std::uint32_t*>(from));
  }
  return __ldg(from) | static_cast<std::uint32_t>(__ldg(from + 1)) << 16;
}

// `sums` are laid out as multiply() leaves them: a thread has one pair of columns in every eight,
// of two rows. In an activating tile, each half of the columns belongs to another projection.
template <typename Variant>
__device__ __forceinline__ void add_bias(float (&sums)[128], const KernelArgs& args,
                                         const Target& target, int thread) {
  if (Variant::kProduct != Product::forward || args.bias == nullptr) return;
  const int line = thread / 32 * 16 + thread % 32 / 4;
  const float above =
      line < target.rows ? number_or_one(args.bias_factors, target.row + line) : 0.0F;
  const float below =
      line + 8 < target.rows ? number_or_one(args.bias_factors, target.row + line + 8) : 0.0F;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int part = Variant::kActivates ? half : target.part;
    const int first = target.column + (Variant::kActivates ? 0 : half * (kTileColumns / 2));
    const auto* const bias =
        static_cast<const std::uint16_t*>(args.bias[part * args.groups + target.group].data);
    if (bias == nullptr) continue;
#pragma unroll
    for (int i = 0; i < kTileColumns / 16; ++i) {
      const int column = first + i * 8 + thread % 4 * 2;
      const std::uint32_t pair = column < args.columns ? load_pair(bias + column) : 0;
      const float left = __uint_as_float(pair << 16);
      const float right = __uint_as_float(pair & 0xFFFF0000U);
      float* const sum = sums + half * 64 + 4 * i;
      sum[0] += above * left;
      sum[1] += above * right;
      sum[2] += below * left;
      sum[3] += below * right;
    }
  }
}

}  // namespace switchyard::cuda::hopper
