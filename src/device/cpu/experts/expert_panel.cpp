// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/experts/expert_panel.h"

#include <algorithm>
#include <cstring>

#include "core/given.h"
#include "device/activation_constants.h"
#include "device/cpu/gemm/gemm.h"
#include "device/cpu/rows/row_table.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

static_assert(static_cast<int>(Activation::silu) + 1 == kNumActivations);

PanelRows take_rows(std::int64_t rows, std::int64_t width, Dtype dtype, Scratch& scratch) {
  return {scratch.take_bytes(rows * width * size_of(dtype)), width, dtype};
}

void scale_row(std::byte* to, const std::byte* from, float factor, Dtype dtype,
               std::int64_t elements) {
  row_kernels_for(dtype).scale(&to, &factor, 1, from, elements, Stores::cached);
}

// Sets every row to the bias, times the row's weight if given, so that a product can be accumulated
// onto it and rounded once.
void fill_with_bias(const PanelRows& rows, std::int64_t num_rows, const ConstTensorView& bias,
                    const float* row_weights, Scratch& scratch) {
  const auto width = bias.shape()[0];
  float* wide = scratch.take_floats(2 * width);
  float* weighted = wide + width;
  for (std::int64_t i = 0; i < width; ++i) wide[i] = element(bias, i);
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const float factor = row_weights != nullptr ? row_weights[r] : 1.0F;
    for (std::int64_t i = 0; i < width; ++i) weighted[i] = factor * wide[i];
    if (rows.dtype == Dtype::f32) {
      std::memcpy(rows.row(r), weighted, static_cast<std::size_t>(width) * sizeof(float));
    } else {
      element_kernels().narrow(rows.row(r), weighted, width);
    }
  }
}

// to = x · matrixᵀ + bias
void project(const PanelRows& x, std::int64_t num_rows, const ConstTensorView& matrix,
             const ConstTensorView& bias, const PanelRows& to, Scratch& scratch) {
  if (is_given(bias)) fill_with_bias(to, num_rows, bias, nullptr, scratch);
  gemm({.m = num_rows,
        .n = matrix.shape()[0],
        .k = matrix.shape()[1],
        .dtype = matrix.dtype(),
        .a = in(x),
        .b = in(matrix, Layout::transposed),
        .c = out(to),
        .accumulate = is_given(bias)},
       scratch);
}

void compute_inner(const ExpertsOptions& options, const ExpertWeights& weights, const PanelRows& x,
                   std::int64_t num_rows, const PanelRows& inner, Scratch& scratch) {
  const bool gated = has_gate(options.activation);
  if (gated) project(x, num_rows, weights.gate, weights.gate_bias, inner, scratch);
  project(x, num_rows, weights.up, weights.up_bias,
          columns_from(inner, gated ? options.intermediate : 0), scratch);
}

// Returns w·x in scratch.
PanelRows weighted_rows(const PanelRows& x, std::int64_t num_rows, const float* row_weights,
                        std::int64_t width, Scratch& scratch) {
  const PanelRows to = take_rows(num_rows, width, x.dtype, scratch);
  for (std::int64_t r = 0; r < num_rows; ++r) {
    scale_row(to.row(r), x.row(r), row_weights[r], x.dtype, width);
  }
  return to;
}

}  // namespace

void forward_panel(const ForwardPanel& panel, Scratch& scratch, TaskClock& clock) {
  const auto& options = panel.options;
  const auto width = options.intermediate;
  const bool weigh_input =
      options.weight_stage == WeightStage::input && panel.row_weights != nullptr;
  const bool weigh_activation =
      options.weight_stage == WeightStage::activation && panel.row_weights != nullptr;
  const PanelRows x =
      weigh_input ? weighted_rows(panel.x, panel.rows, panel.row_weights, options.hidden, scratch)
                  : panel.x;
  const PanelRows inner = panel.inner.data != nullptr ? panel.inner
                                                      : take_rows(panel.rows, options.inner_width(),
                                                                  options.dtype, scratch);
  const PanelRows activated = take_rows(panel.rows, width, options.dtype, scratch);
  clock.count_other();
  compute_inner(options, panel.weights, x, panel.rows, inner, scratch);
  clock.count_gemm();
  const auto activate =
      element_kernels(options.dtype).activation[static_cast<std::size_t>(options.activation)];
  for (std::int64_t r = 0; r < panel.rows; ++r) {
    activate({.inner = inner.row(r),
              .out = activated.row(r),
              .width = width,
              .weight = weigh_activation ? panel.row_weights[r] : 1.0F,
              .constants = constants_of(options)});
  }
  const auto& bias = panel.weights.down_bias;
  if (is_given(bias)) {
    fill_with_bias(panel.out, panel.rows, bias, weigh_activation ? panel.row_weights : nullptr,
                   scratch);
  }
  clock.count_other();
  gemm({.m = panel.rows,
        .n = options.hidden,
        .k = width,
        .dtype = options.dtype,
        .a = in(activated),
        .b = in(panel.weights.down, Layout::transposed),
        .c = out(panel.out),
        .accumulate = is_given(bias)},
       scratch);
  clock.count_gemm();
}

namespace {

// Replaces `inner` by its gradient and sets `activated` to the input of the down projection.
void activation_backward(const BackwardPanel& panel, const float* d_activated, Scratch& scratch) {
  const auto& options = panel.options;
  const bool weigh = options.weight_stage != WeightStage::input && panel.row_weights != nullptr;
  const auto backward = element_kernels(options.dtype)
                            .activation_gradient[static_cast<std::size_t>(options.activation)];
  const bool dot_bias =
      weigh && panel.d_row_weights != nullptr && is_given(panel.weights.down_bias);
  const PanelRows bias = take_rows(1, dot_bias ? options.hidden : 0, options.dtype, scratch);
  if (dot_bias) {
    std::memcpy(bias.data, panel.weights.down_bias.data(),
                static_cast<std::size_t>(options.hidden * size_of(options.dtype)));
  }
  for (std::int64_t r = 0; r < panel.rows; ++r) {
    float d_weight = backward({.inner = panel.inner.row(r),
                               .d_out = d_activated + r * options.intermediate,
                               .out = panel.activated.row(r),
                               .width = options.intermediate,
                               .weight = weigh ? panel.row_weights[r] : 1.0F,
                               .constants = constants_of(options)});
    if (dot_bias) {
      d_weight += row_kernels_for(options.dtype).dot(panel.d_out.row(r), bias.data, options.hidden);
    }
    if (weigh && panel.d_row_weights != nullptr) panel.d_row_weights[r] = d_weight;
  }
}

// d_x = d_gate · gate + d_up · up, rounded once.
void input_gradient(const BackwardPanel& panel, Scratch& scratch) {
  const auto& options = panel.options;
  const bool gated = has_gate(options.activation);
  const bool via_f32 = gated && panel.d_x.dtype != Dtype::f32;
  const PanelRows sums =
      via_f32 ? take_rows(panel.rows, options.hidden, Dtype::f32, scratch) : panel.d_x;
  const auto multiply = [&](const ConstTensorView& matrix, std::int64_t column, bool accumulate) {
    gemm({.m = panel.rows,
          .n = options.hidden,
          .k = options.intermediate,
          .dtype = options.dtype,
          .a = in(columns_from(panel.inner, column)),
          .b = in(matrix),
          .c = out(sums),
          .accumulate = accumulate},
         scratch);
  };
  if (gated) multiply(panel.weights.gate, 0, false);
  multiply(panel.weights.up, gated ? options.intermediate : 0, gated);
  for (std::int64_t r = 0; via_f32 && r < panel.rows; ++r) {
    element_kernels().narrow(panel.d_x.row(r), reinterpret_cast<const float*>(sums.row(r)),
                             options.hidden);
  }
}

// Backward of a weight that entered before the first matrix. Its gradient is ⟨d_x, x⟩; then d_x and
// x are multiplied by it.
void weigh_input_backward(const BackwardPanel& panel) {
  const auto& options = panel.options;
  for (std::int64_t r = 0; r < panel.rows; ++r) {
    std::byte* const x = panel.x.row(r);
    std::byte* const d_x = panel.d_x.row(r);
    if (panel.d_row_weights != nullptr) {
      panel.d_row_weights[r] = row_kernels_for(options.dtype).dot(d_x, x, options.hidden);
    }
    scale_row(d_x, d_x, panel.row_weights[r], options.dtype, options.hidden);
    scale_row(x, x, panel.row_weights[r], options.dtype, options.hidden);
  }
}

}  // namespace

void backward_panel(const BackwardPanel& panel, Scratch& scratch, TaskClock& clock) {
  const auto& options = panel.options;
  const bool weigh_input =
      options.weight_stage == WeightStage::input && panel.row_weights != nullptr;
  if (panel.inner_rows == InnerRows::to_be_computed) {
    const PanelRows x =
        weigh_input ? weighted_rows(panel.x, panel.rows, panel.row_weights, options.hidden, scratch)
                    : panel.x;
    clock.count_other();
    compute_inner(options, panel.weights, x, panel.rows, panel.inner, scratch);
    clock.count_gemm();
  }
  float* d_activated = scratch.take_floats(panel.rows * options.intermediate);
  gemm({.m = panel.rows,
        .n = options.intermediate,
        .k = options.hidden,
        .dtype = options.dtype,
        .a = in(panel.d_out),
        .b = in(panel.weights.down),
        .c = {reinterpret_cast<std::byte*>(d_activated), options.intermediate, Dtype::f32}},
       scratch);
  clock.count_gemm();
  activation_backward(panel, d_activated, scratch);
  clock.count_other();
  input_gradient(panel, scratch);
  clock.count_gemm();
  if (weigh_input) weigh_input_backward(panel);
  clock.count_other();
}

}  // namespace switchyard::cpu
