// SPDX-License-Identifier: Apache-2.0
// Checks whether tensors share memory, for when one is written while the other is read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "core/require.h"
#include "switchyard/tensor.h"

namespace switchyard {
namespace overlap {

inline std::uintptr_t begin_of(const ConstTensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data());
}
inline std::uintptr_t end_of(const ConstTensorView& view) {
  return begin_of(view) + static_cast<std::uintptr_t>((view.rows() - 1) * view.row_stride_bytes() +
                                                      view.row_bytes());
}

// True if the bytes [begin, end) overlap a row of the view. The gaps between rows do not count.
inline bool meets_row(std::uintptr_t begin, std::uintptr_t end, const ConstTensorView& view) {
  if (end <= begin_of(view) || begin >= end_of(view)) return false;
  const auto stride = static_cast<std::uintptr_t>(view.row_stride_bytes());
  const auto width = static_cast<std::uintptr_t>(view.row_bytes());
  const auto from = std::max(begin, begin_of(view)) - begin_of(view);
  // The range starts inside a row, or it starts in a gap and reaches the next row.
  return from % stride < width || begin_of(view) + (from / stride + 1) * stride < end;
}

}  // namespace overlap

// True if the views have a byte in common. Strided rows may interleave without overlapping, as
// column blocks of one matrix do.
inline bool share_memory(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.memory() != b.memory()) return false;
  if (a.shape().num_elements() == 0 || b.shape().num_elements() == 0) return false;
  using overlap::begin_of;
  using overlap::end_of;
  using overlap::meets_row;
  if (end_of(a) <= begin_of(b) || end_of(b) <= begin_of(a)) return false;
  if (a.is_contiguous()) return meets_row(begin_of(a), end_of(a), b);
  if (a.row_stride_bytes() == b.row_stride_bytes() && a.rows() > 1 && b.rows() > 1) {
    const auto stride = static_cast<std::uintptr_t>(a.row_stride_bytes());
    const auto first = std::min(begin_of(a), begin_of(b));
    const auto column_a = (begin_of(a) - first) % stride;
    const auto column_b = (begin_of(b) - first) % stride;
    const auto width_a = static_cast<std::uintptr_t>(a.row_bytes());
    const auto width_b = static_cast<std::uintptr_t>(b.row_bytes());
    if (column_a + width_a <= column_b && column_b + width_b <= stride + column_a) return false;
    if (column_b + width_b <= column_a && column_a + width_a <= stride + column_b) return false;
  }
  for (std::int64_t i = 0; i < a.rows(); ++i) {
    const auto begin = reinterpret_cast<std::uintptr_t>(a.row(i));
    if (meets_row(begin, begin + static_cast<std::uintptr_t>(a.row_bytes()), b)) return true;
  }
  return false;
}

// Throws if the tensors overlap, for inputs that are still read while an output is written.
// `names` is the subject of the message: "x and y".
inline void require_apart(const ConstTensorView& a, const ConstTensorView& b,
                          std::string_view names) {
  require(!share_memory(a, b), "{} must not overlap in memory", names);
}

}  // namespace switchyard
