// SPDX-License-Identifier: Apache-2.0
// Matrix products on a device, for the parts of a model around its MoE layers.
#pragma once

#include <span>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Says whether a matrix is stored as it is named, or as its transpose.
enum class MatrixLayout { plain, transposed };

// A product c [m, n] = a [m, k] · b [k, n], or c += a · b. A transposed a is a view [k, m], a
// transposed b a view [n, k]. a and b are both f32 or both bf16; c has the same dtype or f32. Sums
// are accumulated in f32 and rounded once. Views may have any row stride; c shares no memory with a
// or b. With k = 0 the product is zero.
struct Matmul {
  ConstTensorView a;
  ConstTensorView b;
  TensorView c;
  MatrixLayout a_layout = MatrixLayout::plain;
  MatrixLayout b_layout = MatrixLayout::plain;
  GradientMode mode = GradientMode::overwrite;
};

// Computes one product. The bits depend on sizes, row strides and dtypes, not on the number of
// threads. Throws InvalidArgument, naming what does not fit, and then writes nothing.
SWITCHYARD_API void matmul(const Device& device, const Matmul& product);
// Computes independent products together, so that threads stay busy even if each product is small.
SWITCHYARD_API void matmul(const Device& device, std::span<const Matmul> products);

}  // namespace switchyard
