// A line of a row: the 16 bytes that a thread reads or writes at once.
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

// How a row of `width` elements is cut into lines. Where rows are not aligned, the same lines are
// read and written element by element: sums over lines have the same order either way.
struct Lines {
  int width = 0;
  int count = 0;
  bool is_aligned = false;  // in all rows

  // Beyond the end of the row there are zeros. What is read once leaves the cache first.
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
// The lines of rows and vectors of this width; aligned if all of them are.
template <typename T, typename... More>
Lines lines_of(std::int64_t width, const More&... rows) {
  constexpr int kElements = Line<T>::kElements;
  return {static_cast<int>(width), static_cast<int>((width + kElements - 1) / kElements),
          width % kElements == 0 && (is_aligned<T>(rows) && ...)};
}

// launch(T{}): which kernel it is to be.
template <typename Launch>
void for_dtype(Dtype dtype, Launch launch) {
  dtype == Dtype::bf16 ? launch(__nv_bfloat16{}) : launch(float{});
}

}  // namespace switchyard::cuda
