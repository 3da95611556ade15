// SPDX-License-Identifier: Apache-2.0
// Passes over the experts' rows between the products. Every pass visits only the rows of groups,
// and all rows have the dtype it is given.
#pragma once

#include <cstdint>
#include <span>

#include "device/cuda/grouped_gemm.h"
#include "device/cuda/runtime/context.h"
#include "switchyard/experts.h"

namespace switchyard::cuda {

// activation.cu

// activated = [weight ·] activation(inner)
struct Activate {
  const ExpertsOptions& options;
  Groups groups;
  Rows inner;                          // [R, inner_width]
  const float* row_weights = nullptr;  // [R] or null: all 1
  Rows activated;                      // out [R, I]
};
void activate(const Activate& args, Context& context);

struct ActivateBackward {
  const ExpertsOptions& options;
  Groups groups;
  Rows inner;                          // in: [R, inner_width]; out: its gradient
  Rows activated;                      // in: its gradient [R, I]; out: weight · activation
  const float* row_weights = nullptr;  // [R] or null: all 1
  float* d_row_weights = nullptr;      // out [R] or null: ⟨d_activated, activation⟩
};
void activate_backward(const ActivateBackward& args, Context& context);

// sums[r] += ⟨rows[r], bias of the row's group⟩
struct BiasDots {
  Dtype dtype = Dtype::f32;
  Groups groups;
  std::int64_t width = 0;
  SourceRows rows;
  std::span<const MatrixRef> bias;  // host; [width] per group, or null
  RowNumbers<float> sums;
};
void add_bias_dots(const BiasDots& args, Context& context);

// weigh_rows.cu

// to = weight · from
struct WeighRows {
  Dtype dtype = Dtype::f32;
  Groups groups;
  std::int64_t width = 0;
  Rows from;
  const float* row_weights = nullptr;  // [R]
  Rows to;                             // out
};
void weigh_rows(const WeighRows& args, Context& context);

// Backward of weights at the input: multiplies x and d_x by the weight, in place. The gradient of
// the weight is ⟨d_x, x⟩, computed before scaling.
struct WeighRowsBackward {
  Dtype dtype = Dtype::f32;
  Groups groups;
  std::int64_t width = 0;
  Rows x;
  Rows d_x;
  const float* row_weights = nullptr;  // [R]
  float* d_row_weights = nullptr;      // out [R] or null
};
void weigh_rows_backward(const WeighRowsBackward& args, Context& context);

// to[r] = the token that row r is read from
struct RowsFromTokens {
  Dtype dtype = Dtype::f32;
  Groups groups;
  std::int64_t width = 0;
  SourceRows from;
  Rows to;  // out
};
void rows_from_tokens(const RowsFromTokens& args, Context& context);

// to += from, in f32 and rounded once
struct AddRows {
  Dtype dtype = Dtype::f32;
  Groups groups;
  std::int64_t width = 0;
  Rows from;
  Rows to;
};
void add_rows(const AddRows& args, Context& context);

// bias_gradients.cu

// Column sums over a group's rows: gradients[part · groups + group] [width] (+)=
// Σ_r [row_weights[r] ·] rows[r, part · width …], in an order that depends on the group's rows
// alone. A group without rows gives zeros, or adds nothing.
struct BiasGradients {
  Dtype dtype = Dtype::f32;  // dtype of rows
  Groups groups;
  SourceRows rows;  // [R, parts · width]
  int parts = 1;
  std::int64_t width = 0;
  RowNumbers<const float> row_weights = {};  // null data: all 1
  std::span<const TensorView> gradients;     // host; each is f32, `dtype` or null
  bool accumulate = false;
};
void bias_gradients(const BiasGradients& args, Context& context);

}  // namespace switchyard::cuda
