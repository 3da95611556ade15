// SPDX-License-Identifier: Apache-2.0
// Expert ids in the form that other systems use.
#pragma once

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::testing {

// Converts ids to i64, with `none` in place of −1.
inline Tensor wide_ids(const Tensor& ids, std::int64_t none = -1) {
  Tensor wide(ids.shape(), Dtype::i64);
  const auto from = ids.span<std::int32_t>();
  for (std::size_t i = 0; i < from.size(); ++i) {
    wide.span<std::int64_t>()[i] = from[i] == -1 ? none : from[i];
  }
  return wide;
}

}  // namespace switchyard::testing
