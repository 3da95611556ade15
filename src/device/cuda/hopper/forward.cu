// SPDX-License-Identifier: Apache-2.0
// c = a · Bᵀ over groups of rows, on Hopper tensor cores.
#include "device/cuda/hopper/fits.h"
#include "device/cuda/hopper/grouped_gemm.cuh"

namespace switchyard::cuda::hopper {
namespace {

KernelArgs kernel_args(const ForwardGemm& args, Context& context) {
  const std::int64_t rows = args.groups.row_capacity;
  const std::int64_t n = args.b.rows;
  const std::int64_t k = args.b.columns;
  KernelArgs to = args_of(args.groups);
  to.a = tensor_map({.data = args.a.data, .columns = k, .rows = rows, .row_stride = args.a.stride},
                    64);
  to.b = matrix_maps(args.b, args.groups.count, kTileColumns / 2, context);
  if (can_map(args.c)) {
    to.c.whole = tensor_map({.data = args.c.data,
                             .columns = n,
                             .rows = rows,
                             .row_stride = args.c.stride,
                             .parts = args.b.parts,
                             .part_stride = n},
                            64);
  }
  to.part_blocks = blocks_of(n, kTileColumns);
  to.column_blocks = args.b.parts * to.part_blocks;
  to.k_blocks = blocks_of(k, kBlock);
  to.columns = static_cast<int>(n);
  to.c_rows = args.c;
  to.c_has_pairs = has_pairs<__nv_bfloat16>(args.c.data, args.c.stride);
  return to;
}

}  // namespace

bool grouped_gemm(const ForwardGemm& args, Context& context) {
  if (!fits(context, args.dtype, args.b)) return false;
  if (args.groups.count == 0 || args.groups.row_capacity == 0) return true;
  AlignedCopies copies(context);
  ForwardGemm aligned = args;
  aligned.a = copies.of(args.a, args.groups.row_capacity, args.b.columns);
  aligned.b = copies.of(args.b);
  KernelArgs to = kernel_args(aligned, context);
  if (has_bias(args.bias)) {
    to.bias = context.table(args.bias);
    to.bias_factors = args.bias_factors;
  }
  if (can_map(args.c)) {
    launch<Variant<Product::forward, Source::rows, Epilogue::deferred>>(to, context);
  } else {
    launch<Variant<Product::forward, Source::rows, Epilogue::direct>>(to, context);
  }
  return true;
}

}  // namespace switchyard::cuda::hopper
