// SPDX-License-Identifier: Apache-2.0
// The expert ids of a batch, as callers give them and as kernels read them: by token or by
// assignment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "switchyard/tensor.h"

namespace switchyard::cuda {

struct Assignments {
  const std::int32_t* ids = nullptr;  // [T, K], rows `stride` apart
  std::int64_t stride = 0;
  std::int64_t num_tokens = 0;
  unsigned top_k = 1;

  // T · K is below 2³¹.
  __host__ __device__ unsigned count() const { return static_cast<unsigned>(num_tokens) * top_k; }
  __device__ const std::int32_t* row(std::int64_t token) const { return ids + token * stride; }
  __device__ std::int32_t id(unsigned assignment) const {
    const unsigned token = assignment / top_k;
    return row(token)[assignment - token * top_k];
  }
};

inline Assignments assignments_of(const ConstTensorView& expert_ids) {
  return {reinterpret_cast<const std::int32_t*>(expert_ids.data()), expert_ids.row_stride(),
          expert_ids.rows(), static_cast<unsigned>(expert_ids.shape()[1])};
}

constexpr std::int64_t kLowestId = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kHighestId = std::numeric_limits<std::int32_t>::max();

// Turns the ids that callers give into i32 (see NarrowIds).
struct Narrowing {
  bool has_sentinels = false;
  std::int64_t first_sentinel = 0;

  explicit Narrowing(const std::optional<std::int64_t>& first)
      : has_sentinels(first.has_value()), first_sentinel(first.value_or(0)) {}

  __device__ std::int32_t operator()(std::int64_t id) const {
    if (has_sentinels && id >= first_sentinel) return -1;
    return static_cast<std::int32_t>(max(kLowestId, min(kHighestId, id)));
  }
};

constexpr unsigned kElementThreads = 256;

// Returns how many blocks of kElementThreads to launch for a kernel that loops over `count` > 0
// elements.
inline unsigned blocks_over(std::int64_t count, int num_multiprocessors) {
  const std::int64_t wanted = (count + kElementThreads - 1) / kElementThreads;
  return static_cast<unsigned>(std::min<std::int64_t>(wanted, 16LL * num_multiprocessors));
}
__device__ inline unsigned first_element() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline unsigned element_stride() { return gridDim.x * blockDim.x; }

// Returns a pointer to the elements of a contiguous view.
template <typename T>
T* elements(const TensorView& view) {
  return reinterpret_cast<T*>(view.data());
}
template <typename T>
const T* elements(const ConstTensorView& view) {
  return reinterpret_cast<const T*>(view.data());
}

}  // namespace switchyard::cuda
