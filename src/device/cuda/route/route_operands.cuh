// SPDX-License-Identifier: Apache-2.0
// The operands of the gate's products, as the tensor cores' and the plain f32 pipeline take them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::cuda {

// One operand of a product. Element (i, k) belongs to row or column i of the product.
enum class Runs { along_k, across_k };  // whether k or i is contiguous in memory
template <typename T, Runs kRunsOf>
struct Factor {
  using Element = T;
  static constexpr Runs kRuns = kRunsOf;
  const T* data;
  std::int64_t row_stride;

  __device__ const T* at(std::int64_t i, std::int64_t k) const {
    return data + (kRuns == Runs::along_k ? i * row_stride + k : k * row_stride + i);
  }
};

template <typename T, Runs kRuns, typename View>
Factor<T, kRuns> factor_of(const View& view) {
  return {reinterpret_cast<const T*>(view.data()), view.row_stride()};
}

struct ProductSizes {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t k_part = 0;  // block z takes part z of k, of this size
  const std::int32_t* keeps =
      nullptr;  // [k] or null: b, which runs across k, counts as 0 where this is 0
};

// True if every row is aligned to 16 bytes.
inline bool has_aligned_rows(const ConstTensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data()) % 16 == 0 &&
         view.row_stride_bytes() % 16 == 0;
}

}  // namespace switchyard::cuda
