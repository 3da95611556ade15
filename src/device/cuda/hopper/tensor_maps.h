// SPDX-License-Identifier: Apache-2.0
// TMA descriptors (tensor maps), encoded on the host.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/cuda/grouped_gemm.h"

namespace switchyard::cuda::hopper {

// A bf16 tensor [parts, groups, rows, columns]. Strides are in elements, and multiples of eight.
struct TensorLayout {
  const void* data = nullptr;
  std::int64_t columns = 0;
  std::int64_t rows = 0;
  std::int64_t row_stride = 0;
  std::int64_t groups = 1;
  std::int64_t group_stride = 0;
  std::int64_t parts = 1;
  std::int64_t part_stride = 0;
};

constexpr int kBoxColumns = 64;  // 128 bytes: the most that the swizzle allows

// Returns a tensor map for boxes of [1, 1, box_rows, 64] with the 128-byte swizzle.
CUtensorMap tensor_map(const TensorLayout& tensor, int box_rows);

// Evenly spaced matrices share one map, `whole`. Otherwise each matrix has its own map,
// table[part · groups + group], in device memory.
struct MatrixMaps {
  CUtensorMap whole{};
  const CUtensorMap* table = nullptr;
};
MatrixMaps matrix_maps(const GroupMatrices& matrices, int groups, int box_rows, Context& context);

// True if TMA can address the tensors: 16-byte aligned, with row strides that are multiples of
// eight elements.
bool can_map(const Rows& rows);
bool can_map(const GroupMatrices& matrices);

}  // namespace switchyard::cuda::hopper
