// SPDX-License-Identifier: Apache-2.0
// Runs groups of rows through their experts, forward and backward: grouped products and row passes.
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
  SourceRows x;  // [R, H]; backward replaces it by w·x if weight_stage is input
  RowNumbers<const float> row_weights = {};
  // [R, inner_width]; backward replaces it by its gradient. Null data in forward: not kept.
  Rows inner = {};
};
// `out` [R, H] may alias x.
void expert_forward(const ExpertPass& pass, const Rows& out, Context& context);

struct ExpertPassGradients {
  InnerRows inner_rows = InnerRows::kept;
  SourceRows d_out;  // [R, H]
  // Out [R, H]. Must not alias another tensor: it holds gathered rows until it is computed.
  Rows d_x;
  RowNumbers<float> d_row_weights = {};  // out
  std::span<const ExpertGradients> weights;
  GradientMode mode = GradientMode::overwrite;
};
void expert_backward(const ExpertPass& pass, const ExpertPassGradients& out, Context& context);

// Parts of expert_backward(), in matrix_gradients.cpp. They compute out.weights of the first
// projections, and of the down projection from its input. Both may gather tokens into out.d_x.
void inner_gradients(const ExpertPass& pass, const ExpertPassGradients& out, Context& context);
void outer_gradients(const ExpertPass& pass, const ExpertPassGradients& out, const Rows& activated,
                     Context& context);

inline SourceRows rows_of(const ConstTensorView& view) {
  return {{view.data(), view.row_stride()}};
}

}  // namespace switchyard::cuda
