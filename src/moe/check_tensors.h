// SPDX-License-Identifier: Apache-2.0
// Checks for weights and their gradients.
#pragma once

#include <string_view>

#include "core/check_memory.h"
#include "core/given.h"
#include "core/overlap.h"
#include "core/require.h"
#include "switchyard/tensor.h"

namespace switchyard {

inline bool is_real(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16; }

// Cheap checks of a weight and of its gradient, which run every step for every expert. The
// require_* functions below build parts of their message first, so callers run them only when these
// fail.
inline bool fits(const ConstTensorView& view, const Shape& expected) {
  return is_given(view) && is_real(view.dtype()) && view.shape() == expected &&
         (expected.rank() > 1 || view.is_contiguous());
}
inline bool gradient_fits(const ConstTensorView& gradient, const ConstTensorView& weight) {
  if (!is_given(gradient) || !is_given(weight)) return is_given(gradient) == is_given(weight);
  return fits(gradient, weight.shape()) &&
         (gradient.dtype() == weight.dtype() || gradient.dtype() == Dtype::f32);
}

inline void require_matrix(const ConstTensorView& view, const Shape& expected,
                           std::string_view name) {
  require(is_given(view), "{} {} is missing", name, expected);
  require(is_real(view.dtype()) && view.shape() == expected,
          "{} is {} {}, but must be {} of f32 or bf16", name, name_of(view.dtype()), view.shape(),
          expected);
}

inline void require_vector(const ConstTensorView& view, std::int64_t size, std::string_view name) {
  require_matrix(view, {size}, name);
  require(view.is_contiguous(), "{} has row stride {}, but must be contiguous", name,
          view.row_stride());
}

// Requires a gradient exactly where there is a weight, with the weight's shape and either its dtype
// or f32.
inline void require_gradient(const ConstTensorView& gradient, const ConstTensorView& weight,
                             std::string_view name) {
  require(is_given(gradient) == is_given(weight), "{} has {}, but {}", name,
          is_given(weight) ? "a weight" : "no weight",
          is_given(weight) ? "no gradient was given" : "a gradient was given");
  if (!is_given(weight)) return;
  require(gradient.shape() == weight.shape() &&
              (gradient.dtype() == weight.dtype() || gradient.dtype() == Dtype::f32),
          "the gradient of {} is {} {}, but the weight is {} {}", name, name_of(gradient.dtype()),
          gradient.shape(), name_of(weight.dtype()), weight.shape());
  require(gradient.shape().rank() > 1 || gradient.is_contiguous(),
          "the gradient of {} has row stride {}, but must be contiguous", name,
          gradient.row_stride());
}

inline void require_memory_if_given(const ConstTensorView& view, Memory memory,
                                    std::string_view name) {
  if (is_given(view)) require_memory(view, memory, name);
}

}  // namespace switchyard
