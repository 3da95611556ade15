// Products of matrices on a device, for what surrounds MoE layers in a model.
#pragma once

#include <span>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

// How a matrix lies in memory: as it is named, or as its transpose.
enum class MatrixLayout { plain, transposed };

// c [m, n] = a [m, k] · b [k, n], or c += a · b. A transposed a is a view [k, m], a transposed b
// one [n, k]. a and b are f32 or bf16, c of the same dtype or f32; sums are made in f32 and rounded
// once. Rows may lie apart; c shares no memory with a or b. With k = 0 the product is zeros.
struct Matmul {
  ConstTensorView a;
  ConstTensorView b;
  TensorView c;
  MatrixLayout a_layout = MatrixLayout::plain;
  MatrixLayout b_layout = MatrixLayout::plain;
  GradientMode mode = GradientMode::overwrite;
};

// Bits depend on sizes, row strides and dtypes, not on the number of threads. InvalidArgument names
// shapes that do not fit, and then nothing is written.
SWITCHYARD_API void matmul(const Device& device, const Matmul& product);
// Of products that do not use each other's results: threads are busy also where each is small.
SWITCHYARD_API void matmul(const Device& device, std::span<const Matmul> products);

}  // namespace switchyard
