// SPDX-License-Identifier: Apache-2.0
// Compares tensors bit by bit or within a tolerance.
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

// Success if no element differs by more than `most`. For values that may cancel to almost nothing.
::testing::AssertionResult within(const ConstTensorView& actual, const ConstTensorView& expected,
                                  double most);

// Fills a tensor with NaNs (integers: a large number), so that a test notices what was not written.
void poison(const TensorView& tensor);
// Returns a new poisoned tensor in host memory.
Tensor poisoned(const Shape& shape, Dtype dtype);

}  // namespace switchyard::testing
