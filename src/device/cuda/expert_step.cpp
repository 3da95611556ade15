#include "device/cuda/expert_step.h"

#include <algorithm>
#include <vector>

#include "device/cuda/expert_passes.h"
#include "device/cuda/expert_refs.h"

namespace switchyard::cuda {
namespace {

bool weighs_input(const ExpertStep& step) {
  return step.row_weights != nullptr && step.options.weight_stage == WeightStage::input;
}

TensorView take_rows(const ExpertStep& step, std::int64_t width, Context& context) {
  return context.take({step.groups.row_capacity, width}, step.options.dtype);
}

void compute_hidden(const ExpertStep& step, Context& context) {
  const auto& options = step.options;
  TensorView weighted;
  Rows x = step.x;
  if (weighs_input(step)) {
    weighted = take_rows(step, options.hidden, context);
    x = rows_of(weighted);
    weigh_rows({.dtype = options.dtype,
                .groups = step.groups,
                .width = options.hidden,
                .from = step.x,
                .row_weights = step.row_weights,
                .to = x},
               context);
    context.mark("activation");
  }
  const auto matrices = inner_matrices<ConstTensorView>(options);
  const auto refs = refs_of(step.weights, matrices);
  const auto biases = bias_refs_of(step.weights, inner_biases<ConstTensorView>(options));
  grouped_gemm(ForwardGemm{.dtype = options.dtype,
                           .groups = step.groups,
                           .a = x,
                           .b = {refs, static_cast<int>(matrices.size()), options.intermediate,
                                 options.hidden},
                           .c = step.hidden,
                           .bias = biases},
               context);
  context.mark("experts");
}

}  // namespace

void expert_forward(const ExpertStep& step, const Rows& out, Context& context) {
  if (step.groups.count == 0 || step.groups.row_capacity == 0) return;
  const auto& options = step.options;
  compute_hidden(step, context);
  const TensorView activated = take_rows(step, options.intermediate, context);
  const float* const weights =
      options.weight_stage == WeightStage::activation ? step.row_weights : nullptr;
  activate({.options = options,
            .groups = step.groups,
            .hidden = step.hidden,
            .row_weights = weights,
            .activated = rows_of(activated)},
           context);
  context.mark("activation");
  const auto refs = refs_of(step.weights, {&ExpertWeights::down});
  const auto biases = bias_refs_of(step.weights, {&ExpertWeights::down_bias});
  grouped_gemm(ForwardGemm{.dtype = options.dtype,
                           .groups = step.groups,
                           .a = rows_of(activated),
                           .b = {refs, 1, options.hidden, options.intermediate},
                           .c = out,
                           .bias = biases,
                           .bias_factors = weights},
               context);
  context.mark("experts");
}

namespace {

// hidden becomes its gradient, activated the input of the down projection.
void hidden_backward(const ExpertStep& step, const ExpertStepGradients& out, const Rows& activated,
                     Context& context) {
  const auto& options = step.options;
  if (out.hidden_rows == HiddenRows::to_be_computed) compute_hidden(step, context);
  const auto refs = refs_of(step.weights, {&ExpertWeights::down});
  grouped_gemm(InputGradientGemm{.dtype = options.dtype,
                                 .groups = step.groups,
                                 .a = out.d_out,
                                 .b = {refs, 1, options.hidden, options.intermediate},
                                 .c = activated},
               context);
  context.mark("experts");
  const bool weigh = step.row_weights != nullptr && options.weight_stage != WeightStage::input;
  const auto biases = bias_refs_of(step.weights, {&ExpertWeights::down_bias});
  activate_backward({.options = options,
                     .groups = step.groups,
                     .hidden = step.hidden,
                     .activated = activated,
                     .row_weights = weigh ? step.row_weights : nullptr,
                     .d_row_weights = weigh ? out.d_row_weights : nullptr,
                     .d_out = out.d_out,
                     .down_bias = biases},
                    context);
  context.mark("activation");
}

void input_backward(const ExpertStep& step, const ExpertStepGradients& out, Context& context) {
  const auto& options = step.options;
  const auto matrices = inner_matrices<ConstTensorView>(options);
  const auto refs = refs_of(step.weights, matrices);
  grouped_gemm(InputGradientGemm{.dtype = options.dtype,
                                 .groups = step.groups,
                                 .a = step.hidden,
                                 .b = {refs, static_cast<int>(matrices.size()),
                                       options.intermediate, options.hidden},
                                 .c = out.d_x},
               context);
  context.mark("experts");
  if (!weighs_input(step)) return;
  weigh_rows_backward({.dtype = options.dtype,
                       .groups = step.groups,
                       .width = options.hidden,
                       .x = step.x,
                       .d_x = out.d_x,
                       .row_weights = step.row_weights,
                       .d_row_weights = out.d_row_weights},
                      context);
  context.mark("activation");
}

// The gradients of one or two matrices an expert and of their biases: left are the gradients of
// what the matrices give, right their inputs.
struct MatrixGradients {
  std::vector<Gradient> matrices;
  std::vector<Gradient> biases;
  Rows left;   // [R, parts · rows]
  Rows right;  // [R, columns]
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const float* bias_weights = nullptr;
};

// One call where all gradients have one dtype, otherwise one a matrix.
void matrix_gradients(const ExpertStep& step, const ExpertStepGradients& out,
                      const MatrixGradients& args, Context& context) {
  const auto views = views_of(out.weights, args.matrices);
  const auto refs = refs_to(views);
  WeightGradientGemm gemm{
      .dtype = step.options.dtype,
      .groups = step.groups,
      .a = {args.left},
      .b = {args.right},
      .c = {refs, static_cast<int>(args.matrices.size()), args.rows, args.columns},
      .c_dtype = views[0].dtype(),
      .accumulate = out.mode == GradientMode::accumulate};
  const auto is_same = [&](const TensorView& view) { return view.dtype() == gemm.c_dtype; };
  if (std::ranges::all_of(views, is_same)) return grouped_gemm(gemm, context);
  const auto num_groups = static_cast<std::size_t>(step.groups.count);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto part = static_cast<std::int64_t>(i / num_groups);
    gemm.groups.row_offsets = step.groups.row_offsets + i % num_groups;
    gemm.groups.group_rows = step.groups.group_rows + i % num_groups;
    gemm.groups.count = 1;
    gemm.a.data = static_cast<const std::byte*>(args.left.data) +
                  part * args.rows * size_of(step.options.dtype);
    gemm.c.refs = std::span(refs).subspan(i, 1);
    gemm.c.parts = 1;
    gemm.c_dtype = views[i].dtype();
    grouped_gemm(gemm, context);
  }
}

void weight_gradients(const ExpertStep& step, const ExpertStepGradients& out,
                      const MatrixGradients& args, Context& context) {
  matrix_gradients(step, out, args, context);
  context.mark("experts");
  const auto biases = views_of(out.weights, args.biases);
  bias_gradients({.dtype = step.options.dtype,
                  .groups = step.groups,
                  .rows = args.left,
                  .parts = static_cast<int>(args.biases.size()),
                  .width = args.rows,
                  .row_weights = args.bias_weights,
                  .gradients = biases,
                  .accumulate = out.mode == GradientMode::accumulate},
                 context);
  context.mark("activation");
}

}  // namespace

void expert_backward(const ExpertStep& step, const ExpertStepGradients& out, Context& context) {
  if (step.groups.count == 0) return;
  const auto& options = step.options;
  const TensorView activated = take_rows(step, options.intermediate, context);
  if (step.groups.row_capacity > 0) {
    hidden_backward(step, out, rows_of(activated), context);
    input_backward(step, out, context);
  }
  weight_gradients(step, out,
                   {.matrices = inner_matrices<TensorView>(options),
                    .biases = inner_biases<TensorView>(options),
                    .left = step.hidden,
                    .right = step.x,
                    .rows = options.intermediate,
                    .columns = options.hidden},
                   context);
  weight_gradients(
      step, out,
      {.matrices = {&ExpertGradients::down},
       .biases = {&ExpertGradients::down_bias},
       .left = out.d_out,
       .right = rows_of(activated),
       .rows = options.hidden,
       .columns = options.intermediate,
       .bias_weights = options.weight_stage != WeightStage::input ? step.row_weights : nullptr},
      context);
}

}  // namespace switchyard::cuda
