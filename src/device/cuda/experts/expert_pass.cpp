// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/experts/expert_pass.h"

#include "core/require.h"
#include "device/cuda/experts/expert_refs.h"
#include "device/cuda/experts/row_passes.h"

namespace switchyard::cuda {
namespace {

bool weighs_input(const ExpertPass& pass) {
  return pass.row_weights.data != nullptr && pass.options.weight_stage == WeightStage::input;
}

TensorView take_rows(const ExpertPass& pass, std::int64_t width, Context& context) {
  return context.take({pass.groups.row_capacity, width}, pass.options.dtype);
}

// The other products cannot read tokens: a caller that passes them must check reads_tokens() first.
const Rows& without_tokens(const SourceRows& rows) {
  check_invariant(rows.sources == nullptr,
                  "tokens were given to a product that can only read rows");
  return rows;
}

// Returns the input of the first projections: x, or w·x in memory that `weighted` owns.
SourceRows inner_input(const ExpertPass& pass, TensorView& weighted, Context& context) {
  if (!weighs_input(pass)) return pass.x;
  weighted = take_rows(pass, pass.options.hidden, context);
  weigh_rows({.dtype = pass.options.dtype,
              .groups = pass.groups,
              .width = pass.options.hidden,
              .from = pass.x,
              .row_weights = pass.row_weights.data,
              .to = rows_of(weighted)},
             context);
  context.mark("activation");
  return rows_of(weighted);
}

// Computes the first projections and their activation, in one fused kernel if there is one.
// Otherwise they go through `inner`, for which scratch memory is taken if it is not kept.
void activate_rows(const ExpertPass& pass, const RowNumbers<const float>& weights,
                   const Rows& activated, Context& context) {
  const auto& options = pass.options;
  TensorView weighted;
  const SourceRows x = inner_input(pass, weighted, context);
  const auto matrices = inner_matrices<ConstTensorView>(options);
  const auto refs = refs_of(pass.weights, matrices);
  const auto biases = bias_refs_of(pass.weights, inner_biases<ConstTensorView>(options));
  const GroupMatrices b{refs, static_cast<int>(matrices.size()), options.intermediate,
                        options.hidden};
  const bool is_done = hopper::grouped_gemm(ActivatedGemm{.options = options,
                                                          .groups = pass.groups,
                                                          .a = x,
                                                          .b = b,
                                                          .inner = pass.inner,
                                                          .activated = activated,
                                                          .weights = weights,
                                                          .bias = biases},
                                            context);
  if (is_done) return context.mark("experts");
  TensorView scratch;
  Rows inner = pass.inner;
  if (inner.data == nullptr) {
    scratch = take_rows(pass, options.inner_width(), context);
    inner = rows_of(scratch);
  }
  grouped_gemm(ForwardGemm{.dtype = options.dtype,
                           .groups = pass.groups,
                           .a = without_tokens(x),
                           .b = b,
                           .c = inner,
                           .bias = biases},
               context);
  context.mark("experts");
  activate({.options = options,
            .groups = pass.groups,
            .inner = inner,
            .row_weights = weights.data,
            .activated = activated},
           context);
  context.mark("activation");
}

}  // namespace

void expert_forward(const ExpertPass& pass, const Rows& out, Context& context) {
  if (pass.groups.count == 0 || pass.groups.row_capacity == 0) return;
  const auto& options = pass.options;
  const TensorView activated = take_rows(pass, options.intermediate, context);
  const bool weighs = options.weight_stage == WeightStage::activation;
  const auto weights = weighs ? pass.row_weights : RowNumbers<const float>{};
  activate_rows(pass, weights, rows_of(activated), context);
  const auto refs = refs_of(pass.weights, {&ExpertWeights::down});
  const auto biases = bias_refs_of(pass.weights, {&ExpertWeights::down_bias});
  grouped_gemm(ForwardGemm{.dtype = options.dtype,
                           .groups = pass.groups,
                           .a = rows_of(activated),
                           .b = {refs, 1, options.hidden, options.intermediate},
                           .c = out,
                           .bias = biases,
                           .bias_factors = weights},
               context);
  context.mark("experts");
}

namespace {

// Adds the part of the routing weights' gradients that comes from the bias of the down projection.
void add_bias_dots(const ExpertPass& pass, const ExpertPassGradients& out,
                   const RowNumbers<float>& d_weights, Context& context) {
  if (d_weights.data == nullptr) return;
  const auto biases = bias_refs_of(pass.weights, {&ExpertWeights::down_bias});
  if (biases.empty()) return;
  cuda::add_bias_dots({.dtype = pass.options.dtype,
                       .groups = pass.groups,
                       .width = pass.options.hidden,
                       .rows = out.d_out,
                       .bias = biases,
                       .sums = d_weights},
                      context);
  context.mark("activation");
}

// Replaces inner by its gradient, and fills activated with the input of the down projection, in one
// fused kernel if there is one.
void inner_backward(const ExpertPass& pass, const ExpertPassGradients& out, const Rows& activated,
                    Context& context) {
  const auto& options = pass.options;
  if (out.inner_rows == InnerRows::to_be_computed) {
    activate_rows(pass, {}, activated, context);  // recomputes inner; `activated` is overwritten
  }
  const auto refs = refs_of(pass.weights, {&ExpertWeights::down});
  const GroupMatrices down{refs, 1, options.hidden, options.intermediate};
  const bool weighs = options.weight_stage != WeightStage::input;
  const auto weights = weighs ? pass.row_weights : RowNumbers<const float>{};
  const bool has_weights = weights.data != nullptr;
  const auto d_weights = has_weights ? out.d_row_weights : RowNumbers<float>{};
  const bool is_done = hopper::grouped_gemm(ActivationGradientGemm{.options = options,
                                                                   .groups = pass.groups,
                                                                   .a = out.d_out,
                                                                   .b = down,
                                                                   .inner = pass.inner,
                                                                   .activated = activated,
                                                                   .weights = weights,
                                                                   .d_weights = d_weights},
                                            context);
  if (is_done) {
    context.mark("experts");
    return add_bias_dots(pass, out, d_weights, context);
  }
  grouped_gemm(InputGradientGemm{.dtype = options.dtype,
                                 .groups = pass.groups,
                                 .a = without_tokens(out.d_out),
                                 .b = down,
                                 .c = activated},
               context);
  context.mark("experts");
  activate_backward({.options = options,
                     .groups = pass.groups,
                     .inner = pass.inner,
                     .activated = activated,
                     .row_weights = weights.data,
                     .d_row_weights = d_weights.data},
                    context);
  context.mark("activation");
  add_bias_dots(pass, out, d_weights, context);
}

void input_backward(const ExpertPass& pass, const ExpertPassGradients& out, Context& context) {
  const auto& options = pass.options;
  const auto matrices = inner_matrices<ConstTensorView>(options);
  const auto refs = refs_of(pass.weights, matrices);
  grouped_gemm(InputGradientGemm{.dtype = options.dtype,
                                 .groups = pass.groups,
                                 .a = pass.inner,
                                 .b = {refs, static_cast<int>(matrices.size()),
                                       options.intermediate, options.hidden},
                                 .c = out.d_x},
               context);
  context.mark("experts");
  if (!weighs_input(pass)) return;
  weigh_rows_backward({.dtype = options.dtype,
                       .groups = pass.groups,
                       .width = options.hidden,
                       .x = without_tokens(pass.x),
                       .d_x = out.d_x,
                       .row_weights = pass.row_weights.data,
                       .d_row_weights = out.d_row_weights.data},
                      context);
  context.mark("activation");
}

}  // namespace

void expert_backward(const ExpertPass& pass, const ExpertPassGradients& out, Context& context) {
  if (pass.groups.count == 0) return;
  const TensorView activated = take_rows(pass, pass.options.intermediate, context);
  const bool has_rows = pass.groups.row_capacity > 0;
  if (has_rows) inner_backward(pass, out, rows_of(activated), context);
  const bool has_gradients = !out.weights.empty();
  if (has_gradients) outer_gradients(pass, out, rows_of(activated), context);
  // d_x is computed last, since its memory holds gathered rows until then. With weights at the
  // input nothing is gathered, and input_backward() must scale x before inner_gradients() reads it.
  if (has_rows && weighs_input(pass)) input_backward(pass, out, context);
  if (has_gradients) inner_gradients(pass, out, context);
  if (has_rows && !weighs_input(pass)) input_backward(pass, out, context);
}

}  // namespace switchyard::cuda
