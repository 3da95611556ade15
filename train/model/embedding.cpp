// SPDX-License-Identifier: Apache-2.0
#include "model/embedding.h"

#include <algorithm>

#include "model/row_math.h"

namespace switchyard::train {

void embed(Compute& compute, const ConstTensorView& table, std::span<const std::uint8_t> tokens,
           const TensorView& y) {
  compute.for_each(y.rows(), [&](std::int64_t first, std::int64_t last) {
    for (auto t = first; t < last; ++t) {
      const float* row = row_of(table, tokens[static_cast<std::size_t>(t)]);
      std::copy_n(row, table.shape()[1], row_of(y, t));
    }
  });
}

void embed_backward(Compute& compute, std::span<const std::uint8_t> tokens,
                    const ConstTensorView& d_y, const TensorView& d_table) {
  // Split by columns, so that threads share no element and tokens are added in order.
  compute.for_each(d_table.shape()[1], [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = 0; t < d_y.rows(); ++t) {
      const float* from = row_of(d_y, t);
      float* to = row_of(d_table, tokens[static_cast<std::size_t>(t)]);
      for (auto h = first; h < last; ++h) to[h] += from[h];
    }
  });
}

}  // namespace switchyard::train
