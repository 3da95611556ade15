// What experts do with their rows between the products. Every pass is over the rows of groups
// alone; rows have the dtype it is given.
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
  const float* row_weights = nullptr;  // [R] or none: 1
  Rows activated;                      // out [R, I]
};
void activate(const Activate& args, Context& context);

struct ActivateBackward {
  const ExpertsOptions& options;
  Groups groups;
  Rows inner;                          // [R, inner_width]: becomes its gradient
  Rows activated;                      // [R, I]: its gradient becomes weight · activation
  const float* row_weights = nullptr;  // [R] or none: 1
  float* d_row_weights = nullptr;      // out [R] or none: ⟨d_activated, activation⟩, and with
  Rows d_out = {};                     // [R, H] …
  std::span<const MatrixRef> down_bias = {};  // … host, [H] a group or null: + ⟨d_out, down_bias⟩
};
void activate_backward(const ActivateBackward& args, Context& context);

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

// The weight entered before the first matrix: x and d_x get it, and its gradient is ⟨d_x, x⟩.
struct WeighRowsBackward {
  Dtype dtype = Dtype::f32;
  Groups groups;
  std::int64_t width = 0;
  Rows x;
  Rows d_x;
  const float* row_weights = nullptr;  // [R]
  float* d_row_weights = nullptr;      // out [R] or none
};
void weigh_rows_backward(const WeighRowsBackward& args, Context& context);

// to = the tokens that rows are read from
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

// Sums of columns over a group's rows: gradients[part · groups + group] [width] (+)=
// Σ_r [row_weights[r] ·] rows[r, part · width …], in an order that depends on the group's rows
// alone. Without rows zeros, or nothing to add.
struct BiasGradients {
  Dtype dtype = Dtype::f32;  // of rows
  Groups groups;
  Rows rows;  // [R, parts · width]
  int parts = 1;
  std::int64_t width = 0;
  const float* row_weights = nullptr;     // [R] or none: 1
  std::span<const TensorView> gradients;  // host; f32 or `dtype`, or none
  bool accumulate = false;
};
void bias_gradients(const BiasGradients& args, Context& context);

}  // namespace switchyard::cuda
