// SPDX-License-Identifier: Apache-2.0
// The rows of a panel, in the form that products and kernels take.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/cpu/gemm/gemm.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {

// Rows in memory, `stride` elements apart.
struct PanelRows {
  std::byte* data = nullptr;
  std::int64_t stride = 0;
  Dtype dtype = Dtype::f32;

  std::byte* row(std::int64_t i) const { return data + i * stride * size_of(dtype); }
};
inline PanelRows rows_from(const TensorView& rows, std::int64_t first) {
  return {rows.row(first), rows.row_stride(), rows.dtype()};
}
// The result must only be read.
inline PanelRows rows_from(const ConstTensorView& rows, std::int64_t first) {
  return {const_cast<std::byte*>(rows.row(first)), rows.row_stride(), rows.dtype()};
}

inline MatrixIn in(const PanelRows& rows, Layout layout = Layout::plain) {
  return {rows.data, rows.stride, layout};
}
inline MatrixIn in(const ConstTensorView& matrix, Layout layout = Layout::plain) {
  return {matrix.data(), matrix.row_stride(), layout};
}
inline MatrixOut out(const PanelRows& rows) { return {rows.data, rows.stride, rows.dtype}; }

inline PanelRows columns_from(PanelRows rows, std::int64_t first) {
  rows.data += first * size_of(rows.dtype);
  return rows;
}

}  // namespace switchyard::cpu
