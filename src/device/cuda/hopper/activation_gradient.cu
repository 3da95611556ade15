// SPDX-License-Identifier: Apache-2.0
// The input gradient of the down projection, fused with the gradient of the activation, on Hopper
// tensor cores.
#include "device/cuda/experts/lines.cuh"
#include "device/cuda/hopper/activations.h"
#include "device/cuda/hopper/grouped_gemm.cuh"

namespace switchyard::cuda::hopper {
namespace {

constexpr int kDotColumns = 128;

KernelArgs kernel_args(const ActivationGradientGemm& args, Context& context) {
  KernelArgs to = args_of(args.groups);
  set_a(to, args.a, args.groups.row_capacity, args.b.rows, 64);
  to.b = matrix_maps(args.b, args.groups.count, kBlock, context);
  to.part_blocks = blocks_of(args.b.rows, kBlock);
  to.k_blocks = to.part_blocks;
  to.column_blocks = blocks_of(args.b.columns, kTileColumns);
  to.columns = static_cast<int>(args.b.columns);
  to.activations = activations_of(args.options, args.inner, args.activated, args.weights);
  return to;
}

struct SumDots {
  Groups groups;
  const float* dots;  // [R, blocks]
  int blocks;
  RowNumbers<float> sums;
};

constexpr unsigned kSumBlocks = 4;  // per group

// Adds up the partial dot products of each row, in order.
__global__ void sum_dots(const SumDots args) {
  start_in_turn();
  const unsigned group = blockIdx.x / kSumBlocks;
  const std::int64_t first = args.groups.row_offsets[group];
  const int rows = args.groups.group_rows[group];
  for (unsigned i = blockIdx.x % kSumBlocks * blockDim.x + threadIdx.x;
       i < static_cast<unsigned>(rows); i += kSumBlocks * blockDim.x) {
    const std::int64_t row = first + i;
    float sum = 0.0F;
    for (int b = 0; b < args.blocks; ++b) sum += args.dots[row * args.blocks + b];
    number_of(args.sums, row) = sum;
  }
}

}  // namespace

bool grouped_gemm(const ActivationGradientGemm& args, Context& context) {
  if (!fits(context, args.options.dtype, args.b) || !activates(args.options)) return false;
  const std::int64_t rows = args.groups.row_capacity;
  if (args.groups.count == 0 || rows == 0) return true;
  AlignedCopies copies(context);
  ActivationGradientGemm aligned = args;
  aligned.a = copies.of(args.a, rows, args.b.rows);
  aligned.b = copies.of(args.b);
  AlignedResult inner(args.inner, rows, 2 * args.b.columns, context);
  AlignedResult activated(args.activated, rows, args.b.columns, context);
  aligned.inner = inner.rows();
  aligned.activated = activated.rows();
  KernelArgs to = kernel_args(aligned, context);
  TensorView dots;
  if (args.d_weights.data != nullptr) {
    to.activations.dot_blocks = blocks_of(args.b.columns, kDotColumns);
    dots = context.take({rows, to.activations.dot_blocks}, Dtype::f32);
    to.activations.dots = reinterpret_cast<float*>(dots.data());
  }
  if (args.a.sources != nullptr) {
    launch<Variant<Product::input_gradient, Source::tokens, Epilogue::activate_backward>>(to,
                                                                                          context);
  } else {
    launch<Variant<Product::input_gradient, Source::rows, Epilogue::activate_backward>>(to,
                                                                                        context);
  }
  inner.finish();
  activated.finish();
  if (to.activations.dots != nullptr) {
    const SumDots sums{args.groups, to.activations.dots, to.activations.dot_blocks, args.d_weights};
    launch_early(sum_dots, {.blocks = kSumBlocks * args.groups.count, .threads = 256}, sums,
                 "sum_dots", context);
  }
  return true;
}

}  // namespace switchyard::cuda::hopper
