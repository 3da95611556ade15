// Descriptions of tensors for the bulk copies of Hopper, made on the host.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/cuda/grouped_gemm.h"

namespace switchyard::cuda::hopper {

// bf16 [parts, groups, rows, columns]; strides in elements, multiples of eight.
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

constexpr int kBoxColumns = 64;  // 128 bytes: as many as the swizzle allows

// Copies boxes of [1, 1, box_rows, 64], swizzled in lines of 128 bytes.
CUtensorMap tensor_map(const TensorLayout& tensor, int box_rows);

// Evenly spaced matrices are one tensor. Others have a map each, table[part · groups + group], in
// device memory.
struct MatrixMaps {
  CUtensorMap whole{};
  const CUtensorMap* table = nullptr;
};
MatrixMaps matrix_maps(const GroupMatrices& matrices, int groups, int box_rows, Context& context);

// Whether bulk copies can address them: 16-byte aligned, rows whole multiples of eight elements
// apart.
bool can_map(const Rows& rows);
bool can_map(const GroupMatrices& matrices);

}  // namespace switchyard::cuda::hopper
