// SPDX-License-Identifier: Apache-2.0
// The gate and up projections of groups of rows, fused with the activation, on Hopper tensor cores.
#include "device/cuda/hopper/activations.h"
#include "device/cuda/hopper/grouped_gemm.cuh"

namespace switchyard::cuda::hopper {
namespace {

KernelArgs kernel_args(const ActivatedGemm& args, Context& context) {
  const std::int64_t rows = args.groups.row_capacity;
  KernelArgs to = args_of(args.groups);
  set_a(to, args.a, rows, args.b.columns, 64);
  to.b = matrix_maps(args.b, args.groups.count, kTileColumns / 2, context);
  if (args.inner.data != nullptr) {
    to.c.whole = tensor_map({.data = args.inner.data,
                             .columns = args.b.rows,
                             .rows = rows,
                             .row_stride = args.inner.stride,
                             .parts = 2,
                             .part_stride = args.b.rows},
                            64);
  }
  to.column_blocks = blocks_of(args.b.rows, kTileColumns / 2);
  to.k_blocks = blocks_of(args.b.columns, kBlock);
  to.columns = static_cast<int>(args.b.rows);
  to.activations = activations_of(args.options, args.inner, args.activated, args.weights);
  if (has_bias(args.bias)) to.bias = context.table(args.bias);
  return to;
}

}  // namespace

bool reads_tokens(const ExpertsOptions& options, const Context& context) {
  return fits(context, options.dtype, options.hidden, options.intermediate) && activates(options) &&
         options.weight_stage != WeightStage::input;
}

bool grouped_gemm(const ActivatedGemm& args, Context& context) {
  if (!fits(context, args.options.dtype, args.b) || !activates(args.options)) return false;
  if (args.groups.count == 0 || args.groups.row_capacity == 0) return true;
  AlignedCopies copies(context);
  ActivatedGemm aligned = args;
  aligned.a = copies.of(args.a, args.groups.row_capacity, args.b.columns);
  aligned.b = copies.of(args.b);
  AlignedResult inner(args.inner, args.groups.row_capacity, 2 * args.b.rows, context);
  AlignedResult activated(args.activated, args.groups.row_capacity, args.b.rows, context);
  aligned.inner = inner.rows();
  aligned.activated = activated.rows();
  const KernelArgs to = kernel_args(aligned, context);
  if (args.a.sources != nullptr) {
    launch<Variant<Product::forward, Source::tokens, Epilogue::activate>>(to, context);
  } else {
    launch<Variant<Product::forward, Source::rows, Epilogue::activate>>(to, context);
  }
  inner.finish();
  activated.finish();
  return true;
}

}  // namespace switchyard::cuda::hopper
