// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/experts/matrix_gradients.h"

#include <algorithm>

#include "core/given.h"
#include "device/cpu/experts/panels.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

// The gradient of one matrix: gradient [out, in] = leftᵀ · right over all rows, where `left` holds
// the gradients of the matrix's outputs and `right` its inputs.
struct MatrixGradient {
  const TensorView& gradient;
  const TensorView& bias_gradient;
  PanelRows left;
  PanelRows right;
  const float* bias_weights = nullptr;
};

void bias_gradient(const MatrixGradients& args, const MatrixGradient& matrix, Scratch& scratch) {
  const auto width = matrix.bias_gradient.shape()[0];
  float* sums = scratch.take_floats(width);
  std::fill_n(sums, width, 0.0F);
  element_kernels(matrix.left.dtype)
      .add_rows(sums, matrix.left.data, args.rows, matrix.left.stride, width, matrix.bias_weights);
  const TensorView row(matrix.bias_gradient.data(), matrix.bias_gradient.dtype(), {1, width}, width,
                       matrix.bias_gradient.owner());
  write_gradient(row, {0, width}, sums, args.mode);
}

void matrix_block(const MatrixGradients& args, const MatrixGradient& matrix, std::int64_t block,
                  Scratch& scratch) {
  const auto first = block * kGradientBlockRows;
  const auto last = std::min(first + kGradientBlockRows, matrix.gradient.shape()[0]);
  gemm({.m = last - first,
        .n = matrix.gradient.shape()[1],
        .k = args.rows,
        .dtype = args.options.dtype,
        .a = in(columns_from(matrix.left, first), Layout::transposed),
        .b = in(matrix.right),
        .c = {matrix.gradient.row(first), matrix.gradient.row_stride(), matrix.gradient.dtype()},
        .accumulate = args.mode == GradientMode::accumulate},
       scratch);
  if (block == 0 && is_given(matrix.bias_gradient)) bias_gradient(args, matrix, scratch);
}

}  // namespace

std::int64_t num_gradient_tasks(const ExpertsOptions& options) {
  return (has_gate(options.activation) ? 2 : 1) *
             ceil_div(options.intermediate, kGradientBlockRows) +
         ceil_div(options.hidden, kGradientBlockRows);
}

void gradient_task(const MatrixGradients& args, std::int64_t task, Scratch& scratch,
                   TaskClock& clock) {
  const auto& gradients = args.gradients;
  const auto inner_blocks = ceil_div(args.options.intermediate, kGradientBlockRows);
  const bool gated = has_gate(args.options.activation);
  if (gated && task < inner_blocks) {
    matrix_block(args, {gradients.gate, gradients.gate_bias, args.d_inner, args.x}, task, scratch);
  } else if (task < (gated ? 2 : 1) * inner_blocks) {
    const PanelRows d_up = columns_from(args.d_inner, gated ? args.options.intermediate : 0);
    matrix_block(args, {gradients.up, gradients.up_bias, d_up, args.x}, task % inner_blocks,
                 scratch);
  } else {
    const bool weigh = args.options.weight_stage != WeightStage::input;
    matrix_block(args,
                 {gradients.down, gradients.down_bias, args.d_out, args.activated,
                  weigh ? args.row_weights : nullptr},
                 task - (gated ? 2 : 1) * inner_blocks, scratch);
  }
  clock.count_gemm();
}

}  // namespace switchyard::cpu
