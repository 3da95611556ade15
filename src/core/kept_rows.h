// Copies some rows of a tensor and leaves zeros for the others.
#pragma once

#include <cstdint>
#include <cstring>

#include "switchyard/tensor.h"

namespace switchyard {

// Rows that are not kept are not read: they may hold NaN.
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
