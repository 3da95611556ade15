// SPDX-License-Identifier: Apache-2.0
// Padding tokens, marked by 0 in an i32 mask [T].
#pragma once

#include <cstdint>
#include <cstring>

#include "switchyard/tensor.h"

namespace switchyard {

inline bool is_valid(const ConstTensorView& mask, std::int64_t token) {
  return *reinterpret_cast<const std::int32_t*>(mask.row(token)) != 0;
}

// Copies the rows that `keeps` accepts and zeroes the others. Rejected rows are not read, since
// they may hold NaN.
template <typename Keeps>
void copy_kept_rows(const ConstTensorView& from, const TensorView& to, Keeps keeps) {
  const auto row_bytes = static_cast<std::size_t>(from.row_bytes());
  for (std::int64_t t = 0; t < from.rows(); ++t) {
    if (keeps(t)) {
      std::memcpy(to.row(t), from.row(t), row_bytes);
    } else {
      std::memset(to.row(t), 0, row_bytes);
    }
  }
}

}  // namespace switchyard
