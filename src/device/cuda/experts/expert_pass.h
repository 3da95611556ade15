// Groups of rows through their experts, forward and backward: products, and passes over rows.
#pragma once

#include <span>

#include "device/cuda/grouped_gemm.h"
#include "device/cuda/runtime/context.h"
#include "switchyard/experts.h"

namespace switchyard::cuda {

struct ExpertPass {
  const ExpertsOptions& options;
  std::span<const ExpertWeights> weights;
  Groups groups;
  SourceRows x;  // [R, H]; becomes w·x in the backward of the input stage
  RowNumbers<const float> row_weights = {};
  // [R, inner_width]; becomes its gradient in backward. No data in forward: it is not kept.
  Rows inner = {};
};
// out [R, H] may be the memory of x.
void expert_forward(const ExpertPass& pass, const Rows& out, Context& context);

struct ExpertPassGradients {
  InnerRows inner_rows = InnerRows::kept;
  SourceRows d_out;                      // [R, H]
  Rows d_x;                              // out [R, H]: its own memory, used for rows before
  RowNumbers<float> d_row_weights = {};  // out
  std::span<const ExpertGradients> weights;
  GradientMode mode = GradientMode::overwrite;
};
void expert_backward(const ExpertPass& pass, const ExpertPassGradients& out, Context& context);

// Parts of expert_backward, in matrix_gradients.cpp: out.weights of the first projections, and of
// the down projection from its input. Rows that are read from tokens may be copied to out.d_x.
void inner_gradients(const ExpertPass& pass, const ExpertPassGradients& out, Context& context);
void outer_gradients(const ExpertPass& pass, const ExpertPassGradients& out, const Rows& activated,
                     Context& context);

inline SourceRows rows_of(const ConstTensorView& view) {
  return {{view.data(), view.row_stride()}};
}

}  // namespace switchyard::cuda
