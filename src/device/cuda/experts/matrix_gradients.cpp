// SPDX-License-Identifier: Apache-2.0
// The gradients of experts' matrices and biases.
#include <algorithm>
#include <vector>

#include "device/cuda/experts/expert_pass.h"
#include "device/cuda/experts/expert_refs.h"
#include "device/cuda/experts/row_passes.h"

namespace switchyard::cuda {
namespace {

// Arguments for the gradients of one or two matrices per expert and of their biases. `left` holds
// the gradients of the matrices' outputs, `right` their inputs.
struct MatrixGradients {
  std::vector<Gradient> matrices;
  std::vector<Gradient> biases;
  SourceRows left;                                                // [R, parts · rows]
  SourceRows right;                                               // [R, columns]
  WeightGradientGemm::Side narrow = WeightGradientGemm::Side::a;  // the side with H columns
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  RowNumbers<const float> bias_weights = {};
};

// Makes one call if all gradients have the same dtype, otherwise one per matrix.
void matrix_gradients(const ExpertPass& pass, const ExpertPassGradients& out,
                      const MatrixGradients& args, Context& context) {
  const auto views = views_of(out.weights, args.matrices);
  const auto refs = refs_to(views);
  WeightGradientGemm gemm{
      .dtype = pass.options.dtype,
      .groups = pass.groups,
      .a = args.left,
      .b = args.right,
      .narrow = args.narrow,
      .c = {refs, static_cast<int>(args.matrices.size()), args.rows, args.columns},
      .c_dtype = views[0].dtype(),
      .accumulate = out.mode == GradientMode::accumulate};
  const auto is_same = [&](const TensorView& view) { return view.dtype() == gemm.c_dtype; };
  if (std::ranges::all_of(views, is_same)) return grouped_gemm(gemm, context);
  const auto num_groups = static_cast<std::size_t>(pass.groups.count);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto part = static_cast<std::int64_t>(i / num_groups);
    gemm.groups.row_offsets = pass.groups.row_offsets + i % num_groups;
    gemm.groups.group_rows = pass.groups.group_rows + i % num_groups;
    gemm.groups.count = 1;
    gemm.groups.order = nullptr;
    gemm.a.data = static_cast<const std::byte*>(args.left.data) +
                  part * args.rows * size_of(pass.options.dtype);
    gemm.c.refs = std::span(refs).subspan(i, 1);
    gemm.c.parts = 1;
    gemm.c_dtype = views[i].dtype();
    grouped_gemm(gemm, context);
  }
}

void weight_gradients(const ExpertPass& pass, const ExpertPassGradients& out,
                      const MatrixGradients& args, Context& context) {
  matrix_gradients(pass, out, args, context);
  context.mark("experts");
  const auto biases = views_of(out.weights, args.biases);
  bias_gradients({.dtype = pass.options.dtype,
                  .groups = pass.groups,
                  .rows = args.left,
                  .parts = static_cast<int>(args.biases.size()),
                  .width = args.rows,
                  .row_weights = args.bias_weights,
                  .gradients = biases,
                  .accumulate = out.mode == GradientMode::accumulate},
                 context);
  context.mark("activation");
}

// Returns the input of a weight gradient. Gathers rows from tokens into `scratch` if the product,
// about a tenth slower with tokens, is large compared with the gather (docs/benchmarks.md).
SourceRows gradient_input(const ExpertPass& pass, const SourceRows& rows, int parts,
                          const Rows& scratch, Context& context) {
  constexpr std::int64_t kMostColumns = 2560;
  if (rows.sources == nullptr || parts * pass.options.intermediate <= kMostColumns) return rows;
  rows_from_tokens({.dtype = pass.options.dtype,
                    .groups = pass.groups,
                    .width = pass.options.hidden,
                    .from = rows,
                    .to = scratch},
                   context);
  context.mark("activation");
  return {scratch};
}

}  // namespace

void inner_gradients(const ExpertPass& pass, const ExpertPassGradients& out, Context& context) {
  const auto& options = pass.options;
  const auto matrices = inner_matrices<TensorView>(options);
  const auto parts = static_cast<int>(matrices.size());
  weight_gradients(pass, out,
                   {.matrices = matrices,
                    .biases = inner_biases<TensorView>(options),
                    .left = {pass.inner},
                    .right = gradient_input(pass, pass.x, parts, out.d_x, context),
                    .narrow = WeightGradientGemm::Side::b,
                    .rows = options.intermediate,
                    .columns = options.hidden},
                   context);
}

void outer_gradients(const ExpertPass& pass, const ExpertPassGradients& out, const Rows& activated,
                     Context& context) {
  const auto& options = pass.options;
  weight_gradients(
      pass, out,
      {.matrices = {&ExpertGradients::down},
       .biases = {&ExpertGradients::down_bias},
       .left = gradient_input(pass, out.d_out, 1, out.d_x, context),
       .right = {activated},
       .rows = options.hidden,
       .columns = options.intermediate,
       .bias_weights = options.weight_stage != WeightStage::input ? pass.row_weights
                                                                  : RowNumbers<const float>{}},
      context);
}

}  // namespace switchyard::cuda
