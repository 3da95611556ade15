// Comparison of tensors, to the bit and within a tolerance.
#pragma once

#include <gtest/gtest.h>

#include "switchyard/tensor.h"

namespace switchyard::testing {

// Success if both have the same dtype, shape and bytes; otherwise names the first difference.
::testing::AssertionResult same_bits(const ConstTensorView& actual,
                                     const ConstTensorView& expected);

// Success if ‖actual − expected‖₂ ≤ tolerance · ‖expected‖₂, both f32.
::testing::AssertionResult near(const ConstTensorView& actual, const ConstTensorView& expected,
                                double tolerance);

// Success if no element differs by more than this: for values that may cancel to nearly nothing.
::testing::AssertionResult within(const ConstTensorView& actual, const ConstTensorView& expected,
                                  double most);

// Fills a tensor with NaNs (or, for integers, a large number) that a test will notice.
void poison(const TensorView& tensor);
// A new one, in the host's memory.
Tensor poisoned(const Shape& shape, Dtype dtype);

}  // namespace switchyard::testing
