#include "device/cuda/experts/expert_step.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "device/cuda/experts/expert_passes.h"
#include "device/cuda/experts/expert_refs.h"

namespace switchyard::cuda {
namespace {

bool weighs_input(const ExpertStep& step) {
  return step.row_weights.data != nullptr && step.options.weight_stage == WeightStage::input;
}

TensorView take_rows(const ExpertStep& step, std::int64_t width, Context& context) {
  return context.take({step.groups.row_capacity, width}, step.options.dtype);
}

// The other products know no tokens: whoever gave them some did not ask reads_tokens.
const Rows& without_tokens(const SourceRows& rows) {
  check(rows.sources == nullptr ? cudaSuccess : cudaErrorNotSupported, "rows read from tokens");
  return rows;
}

// What the first projections read: x, or w·x in memory that `weighted` keeps.
SourceRows inner_input(const ExpertStep& step, TensorView& weighted, Context& context) {
  if (!weighs_input(step)) return step.x;
  weighted = take_rows(step, step.options.hidden, context);
  weigh_rows({.dtype = step.options.dtype,
              .groups = step.groups,
              .width = step.options.hidden,
              .from = step.x,
              .row_weights = step.row_weights.data,
              .to = rows_of(weighted)},
             context);
  context.mark("activation");
  return rows_of(weighted);
}

// The first projections and their activation: in one kernel where there is one, and otherwise
// through `inner`, which then needs memory.
void activate_rows(const ExpertStep& step, const RowNumbers<const float>& weights,
                   const Rows& activated, Context& context) {
  const auto& options = step.options;
  TensorView weighted;
  const SourceRows x = inner_input(step, weighted, context);
  const auto matrices = inner_matrices<ConstTensorView>(options);
  const auto refs = refs_of(step.weights, matrices);
  const auto biases = bias_refs_of(step.weights, inner_biases<ConstTensorView>(options));
  const GroupMatrices b{refs, static_cast<int>(matrices.size()), options.intermediate,
                        options.hidden};
  const bool is_done = biases.empty() && hopper::grouped_gemm(ActivatedGemm{.options = options,
                                                                            .groups = step.groups,
                                                                            .a = x,
                                                                            .b = b,
                                                                            .inner = step.inner,
                                                                            .activated = activated,
                                                                            .weights = weights},
                                                              context);
  if (is_done) return context.mark("experts");
  TensorView scratch;
  Rows inner = step.inner;
  if (inner.data == nullptr) {
    scratch = take_rows(step, options.inner_width(), context);
    inner = rows_of(scratch);
  }
  grouped_gemm(ForwardGemm{.dtype = options.dtype,
                           .groups = step.groups,
                           .a = without_tokens(x),
                           .b = b,
                           .c = inner,
                           .bias = biases},
               context);
  context.mark("experts");
  activate({.options = options,
            .groups = step.groups,
            .inner = inner,
            .row_weights = weights.data,
            .activated = activated},
           context);
  context.mark("activation");
}

}  // namespace

void expert_forward(const ExpertStep& step, const Rows& out, Context& context) {
  if (step.groups.count == 0 || step.groups.row_capacity == 0) return;
  const auto& options = step.options;
  const TensorView activated = take_rows(step, options.intermediate, context);
  const bool weighs = options.weight_stage == WeightStage::activation;
  const auto weights = weighs ? step.row_weights : RowNumbers<const float>{};
  activate_rows(step, weights, rows_of(activated), context);
  const auto refs = refs_of(step.weights, {&ExpertWeights::down});
  const auto biases = bias_refs_of(step.weights, {&ExpertWeights::down_bias});
  grouped_gemm(ForwardGemm{.dtype = options.dtype,
                           .groups = step.groups,
                           .a = rows_of(activated),
                           .b = {refs, 1, options.hidden, options.intermediate},
                           .c = out,
                           .bias = biases,
                           .bias_factors = weights.data},
               context);
  context.mark("experts");
}

namespace {

// inner becomes its gradient, activated the input of the down projection: in one kernel where
// there is one.
void inner_backward(const ExpertStep& step, const ExpertStepGradients& out, const Rows& activated,
                    Context& context) {
  const auto& options = step.options;
  if (out.inner_rows == InnerRows::to_be_computed) {
    activate_rows(step, {}, activated, context);  // which is not needed yet, and written over
  }
  const auto refs = refs_of(step.weights, {&ExpertWeights::down});
  const auto biases = bias_refs_of(step.weights, {&ExpertWeights::down_bias});
  const GroupMatrices down{refs, 1, options.hidden, options.intermediate};
  const bool weighs = options.weight_stage != WeightStage::input;
  const auto weights = weighs ? step.row_weights : RowNumbers<const float>{};
  const bool has_weights = weights.data != nullptr;
  const auto d_weights = has_weights ? out.d_row_weights : RowNumbers<float>{};
  const bool is_done =
      biases.empty() && hopper::grouped_gemm(ActivationGradientGemm{.options = options,
                                                                    .groups = step.groups,
                                                                    .a = out.d_out,
                                                                    .b = down,
                                                                    .inner = step.inner,
                                                                    .activated = activated,
                                                                    .weights = weights,
                                                                    .d_weights = d_weights},
                                             context);
  if (is_done) return context.mark("experts");
  grouped_gemm(InputGradientGemm{.dtype = options.dtype,
                                 .groups = step.groups,
                                 .a = without_tokens(out.d_out),
                                 .b = down,
                                 .c = activated},
               context);
  context.mark("experts");
  activate_backward({.options = options,
                     .groups = step.groups,
                     .inner = step.inner,
                     .activated = activated,
                     .row_weights = weights.data,
                     .d_row_weights = d_weights.data,
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
                                 .a = step.inner,
                                 .b = {refs, static_cast<int>(matrices.size()),
                                       options.intermediate, options.hidden},
                                 .c = out.d_x},
               context);
  context.mark("experts");
  if (!weighs_input(step)) return;
  weigh_rows_backward({.dtype = options.dtype,
                       .groups = step.groups,
                       .width = options.hidden,
                       .x = without_tokens(step.x),
                       .d_x = out.d_x,
                       .row_weights = step.row_weights.data,
                       .d_row_weights = out.d_row_weights.data},
                      context);
  context.mark("activation");
}

// The gradients of one or two matrices an expert and of their biases: left are the gradients of
// what the matrices give, right their inputs.
struct MatrixGradients {
  std::vector<Gradient> matrices;
  std::vector<Gradient> biases;
  SourceRows left;                                                // [R, parts · rows]
  SourceRows right;                                               // [R, columns]
  WeightGradientGemm::Side narrow = WeightGradientGemm::Side::a;  // which has H columns
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
      .a = args.left,
      .b = args.right,
      .narrow = args.narrow,
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

// What a weight gradient reads: rows in `scratch` rather than tokens where the product, which takes
// about a tenth longer with tokens, is large beside a pass over the rows (docs/benchmarks.md).
SourceRows gradient_input(const ExpertStep& step, const SourceRows& rows, int parts,
                          const Rows& scratch, Context& context) {
  constexpr std::int64_t kMostColumns = 2560;
  if (rows.sources == nullptr || parts * step.options.intermediate <= kMostColumns) return rows;
  rows_from_tokens({.dtype = step.options.dtype,
                    .groups = step.groups,
                    .width = step.options.hidden,
                    .from = rows,
                    .to = scratch},
                   context);
  context.mark("activation");
  return {scratch};
}

void inner_gradients(const ExpertStep& step, const ExpertStepGradients& out, Context& context) {
  const auto& options = step.options;
  const auto matrices = inner_matrices<TensorView>(options);
  const auto parts = static_cast<int>(matrices.size());
  weight_gradients(step, out,
                   {.matrices = matrices,
                    .biases = inner_biases<TensorView>(options),
                    .left = {step.inner},
                    .right = gradient_input(step, step.x, parts, out.d_x, context),
                    .narrow = WeightGradientGemm::Side::b,
                    .rows = options.intermediate,
                    .columns = options.hidden},
                   context);
}

void outer_gradients(const ExpertStep& step, const ExpertStepGradients& out, const Rows& activated,
                     Context& context) {
  const auto& options = step.options;
  weight_gradients(
      step, out,
      {.matrices = {&ExpertGradients::down},
       .biases = {&ExpertGradients::down_bias},
       .left = gradient_input(step, out.d_out, 1, out.d_x, context),
       .right = {activated},
       .rows = options.hidden,
       .columns = options.intermediate,
       .bias_weights =
           options.weight_stage != WeightStage::input ? step.row_weights.data : nullptr},
      context);
}

}  // namespace

void expert_backward(const ExpertStep& step, const ExpertStepGradients& out, Context& context) {
  if (step.groups.count == 0) return;
  const TensorView activated = take_rows(step, step.options.intermediate, context);
  const bool has_rows = step.groups.row_capacity > 0;
  if (has_rows) inner_backward(step, out, rows_of(activated), context);
  outer_gradients(step, out, rows_of(activated), context);
  // d_x is computed last, and its memory holds gathered rows until then. Of the input stage nothing
  // is gathered, and x has to be weighed before its gradients are made.
  if (has_rows && weighs_input(step)) input_backward(step, out, context);
  inner_gradients(step, out, context);
  if (has_rows && !weighs_input(step)) input_backward(step, out, context);
}

}  // namespace switchyard::cuda
