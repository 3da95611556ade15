// SPDX-License-Identifier: Apache-2.0
// A line is the 16 bytes of a row that a thread reads or writes at once.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "device/cuda/grouped_gemm.h"

namespace switchyard::cuda {

template <typename T>
struct alignas(16) Line {
  static constexpr int kElements = 16 / sizeof(T);
  T elements[kElements];

  __device__ float get(int i) const {
    if constexpr (sizeof(T) == 2) {
      return __bfloat162float(elements[i]);
    } else {
      return elements[i];
    }
  }
  __device__ void set(int i, float value) {
    if constexpr (sizeof(T) == 2) {
      elements[i] = __float2bfloat16_rn(value);
    } else {
      elements[i] = value;
    }
  }
};

// Divides a row of `width` elements into lines. Unaligned rows have the same lines, accessed
// element by element, so sums over lines have the same order either way.
struct Lines {
  int width = 0;
  int count = 0;
  bool is_aligned = false;  // every row is whole lines, 16-byte aligned

  // Elements past the end of the row are zeros. kOnce loads with an evict-first hint.
  template <bool kOnce = true, typename T>
  __device__ Line<T> load(const T* row, int line) const {
    const int first = line * Line<T>::kElements;
    Line<T> result;
    if (is_aligned) {
      const auto* from = reinterpret_cast<const uint4*>(row + first);
      reinterpret_cast<uint4&>(result) = kOnce ? __ldcs(from) : __ldg(from);
    } else {
#pragma unroll
      for (int i = 0; i < Line<T>::kElements; ++i) {
        result.elements[i] = first + i < width ? row[first + i] : T(0.0F);
      }
    }
    return result;
  }

  template <typename T>
  __device__ void store(T* row, int line, const Line<T>& value) const {
    const int first = line * Line<T>::kElements;
    if (is_aligned) {
      *reinterpret_cast<uint4*>(row + first) = reinterpret_cast<const uint4&>(value);
    } else {
#pragma unroll
      for (int i = 0; i < Line<T>::kElements; ++i) {
        if (first + i < width) row[first + i] = value.elements[i];
      }
    }
  }
};

template <typename T>
__device__ const T* row_of(const SourceRows& rows, std::int64_t row) {
  const std::int64_t at = rows.sources != nullptr ? rows.sources[row] / rows.top_k : row;
  return static_cast<const T*>(rows.data) + at * rows.stride;
}
template <typename Float>
__device__ Float& number_of(const RowNumbers<Float>& numbers, std::int64_t row) {
  return numbers.data[numbers.sources != nullptr ? numbers.sources[row] : row];
}
inline __device__ float number_or_one(const RowNumbers<const float>& numbers, std::int64_t row) {
  return numbers.data != nullptr ? number_of(numbers, row) : 1.0F;
}

inline bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}
template <typename T>
T* data_of(const Rows& rows) {
  return static_cast<T*>(const_cast<void*>(rows.data));
}
template <typename T>
bool is_aligned(const Rows& rows) {
  return is_aligned(rows.data) && rows.stride % Line<T>::kElements == 0;
}
template <typename T>
bool is_aligned(std::span<const MatrixRef> vectors) {
  return std::ranges::all_of(vectors, [](const MatrixRef& v) { return is_aligned(v.data); });
}
// Returns the lines of rows and vectors of this width, aligned if all of these are.
template <typename T, typename... More>
Lines lines_of(std::int64_t width, const More&... rows) {
  constexpr int kElements = Line<T>::kElements;
  return {static_cast<int>(width), static_cast<int>((width + kElements - 1) / kElements),
          width % kElements == 0 && (is_aligned<T>(rows) && ...)};
}

// Calls launch(T{}), where T is the element type of `dtype`.
template <typename Launch>
void for_dtype(Dtype dtype, Launch launch) {
  dtype == Dtype::bf16 ? launch(__nv_bfloat16{}) : launch(float{});
}

}  // namespace switchyard::cuda
