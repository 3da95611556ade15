// Groups of rows through their experts, forward and backward: the products and passes of a step.
#pragma once

#include <span>

#include "device/cuda/grouped_gemm.h"
#include "device/cuda/runtime/context.h"
#include "switchyard/experts.h"

namespace switchyard::cuda {

struct ExpertStep {
  const ExpertsOptions& options;
  std::span<const ExpertWeights> weights;
  Groups groups;
  SourceRows x;  // [R, H]; becomes w·x in the backward of the input stage
  RowNumbers<const float> row_weights = {};
  // [R, inner_width]; becomes its gradient in backward. No data in forward: it is not kept.
  Rows inner = {};
};
// out [R, H] may be the memory of x.
void expert_forward(const ExpertStep& step, const Rows& out, Context& context);

struct ExpertStepGradients {
  InnerRows inner_rows = InnerRows::kept;
  SourceRows d_out;                      // [R, H]
  Rows d_x;                              // out [R, H]: its own memory, used for rows before
  RowNumbers<float> d_row_weights = {};  // out
  std::span<const ExpertGradients> weights;
  GradientMode mode = GradientMode::overwrite;
};
void expert_backward(const ExpertStep& step, const ExpertStepGradients& out, Context& context);

inline SourceRows rows_of(const ConstTensorView& view) {
  return {{view.data(), view.row_stride()}};
}

}  // namespace switchyard::cuda
