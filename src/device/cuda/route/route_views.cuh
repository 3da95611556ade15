// Converts views to the matrices that the gate's kernels take.
#pragma once

#include <cstdint>

#include "device/cuda/route/route_split.cuh"
#include "device/cuda/route/route_tile.cuh"
#include "switchyard/tensor.h"

namespace switchyard::cuda {

inline Bf16Matrix bf16_matrix(const ConstTensorView& view) {
  return {reinterpret_cast<const __nv_bfloat16*>(view.data()), view.row_stride(), view.rows(),
          static_cast<int>(view.shape()[1])};
}
inline F32Matrix f32_matrix(const ConstTensorView& view) {
  return {reinterpret_cast<const float*>(view.data()), view.row_stride(), view.rows(),
          static_cast<int>(view.shape()[1])};
}

// True if every row is aligned to 16 bytes.
inline bool has_aligned_rows(const ConstTensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data()) % 16 == 0 &&
         view.row_stride_bytes() % 16 == 0;
}

}  // namespace switchyard::cuda
