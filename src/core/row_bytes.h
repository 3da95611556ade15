// SPDX-License-Identifier: Apache-2.0
// Copies and zeroes whole views in host memory, contiguous or strided.
#pragma once

#include <cstring>

#include "switchyard/tensor.h"

namespace switchyard {

// Copies between views of equal shape and dtype.
inline void copy_rows(const ConstTensorView& from, const TensorView& to) {
  if (from.shape().num_elements() == 0) return;
  if (from.is_contiguous() && to.is_contiguous()) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.bytes()));
    return;
  }
  for (std::int64_t i = 0; i < from.rows(); ++i) {
    std::memcpy(to.row(i), from.row(i), static_cast<std::size_t>(from.row_bytes()));
  }
}

inline void zero_rows(const TensorView& view) {
  if (view.shape().num_elements() == 0) return;
  if (view.is_contiguous()) {
    std::memset(view.data(), 0, static_cast<std::size_t>(view.bytes()));
    return;
  }
  for (std::int64_t i = 0; i < view.rows(); ++i) {
    std::memset(view.row(i), 0, static_cast<std::size_t>(view.row_bytes()));
  }
}

// Returns the bytes of a contiguous view in any memory.
template <typename Byte>
std::span<Byte> bytes_of(const BasicTensorView<Byte>& view) {
  return {view.data(), static_cast<std::size_t>(view.bytes())};
}

}  // namespace switchyard
