// SPDX-License-Identifier: Apache-2.0
// Sizes for tests of row movement, and access to single values.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/tensor.h"

namespace switchyard::testing {

inline float value_at(const ConstTensorView& t, std::int64_t row, std::int64_t column) {
  const std::byte* at = t.row(row) + column * size_of(t.dtype());
  return t.dtype() == Dtype::bf16 ? to_float(*reinterpret_cast<const Bfloat16*>(at))
                                  : *reinterpret_cast<const float*>(at);
}

inline void set_at(const TensorView& t, std::int64_t row, std::int64_t column, float value) {
  std::byte* at = t.row(row) + column * size_of(t.dtype());
  if (t.dtype() == Dtype::bf16) {
    *reinterpret_cast<Bfloat16*>(at) = to_bfloat16(value);
  } else {
    *reinterpret_cast<float*>(at) = value;
  }
}

struct RowSizes {
  std::int64_t count = 5;
  std::int64_t width = 2;
  std::int64_t hidden = 33;
  int buffers = 1;
  std::int64_t apart = 0;  // elements between the rows of tokens
  Dtype dtype = Dtype::f32;
};

inline std::string text_of(const RowSizes& s) {
  return std::to_string(s.count) + " x " + std::to_string(s.width) + " rows of " +
         std::to_string(s.hidden) + " " + std::string(name_of(s.dtype)) + " in " +
         std::to_string(s.buffers) + " buffers, " + std::to_string(s.apart) + " apart";
}

// Returns a view of the first `hidden` columns of wider rows, in the device's memory.
inline TensorView cut(Tensor& wide, std::int64_t hidden) {
  return {wide.data(),     wide.dtype(), {wide.rows(), hidden},
          wide.shape()[1], nullptr,      wide.memory()};
}

}  // namespace switchyard::testing
