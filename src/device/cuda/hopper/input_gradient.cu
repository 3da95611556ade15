// SPDX-License-Identifier: Apache-2.0
// c = Σ_p a_p · B_p over groups of rows, on Hopper tensor cores.
#include "device/cuda/hopper/fits.h"
#include "device/cuda/hopper/grouped_gemm.cuh"

namespace switchyard::cuda::hopper {
namespace {

KernelArgs kernel_args(const InputGradientGemm& args, Context& context) {
  const std::int64_t rows = args.groups.row_capacity;
  const std::int64_t k = args.b.rows;
  const std::int64_t n = args.b.columns;
  KernelArgs to = args_of(args.groups);
  to.a = tensor_map({.data = args.a.data,
                     .columns = k,
                     .rows = rows,
                     .row_stride = args.a.stride,
                     .parts = args.b.parts,
                     .part_stride = k},
                    64);
  to.b = matrix_maps(args.b, args.groups.count, kBlock, context);
  to.c.whole = tensor_map(
      {.data = args.c.data, .columns = n, .rows = rows, .row_stride = args.c.stride}, 64);
  to.part_blocks = blocks_of(k, kBlock);
  to.k_blocks = args.b.parts * to.part_blocks;
  to.column_blocks = blocks_of(n, kTileColumns);
  to.columns = static_cast<int>(n);
  to.c_rows = args.c;
  return to;
}

}  // namespace

bool grouped_gemm(const InputGradientGemm& args, Context& context) {
  if (!fits(context, args.dtype, args.b)) return false;
  if (args.groups.count == 0 || args.groups.row_capacity == 0) return true;
  AlignedCopies copies(context);
  InputGradientGemm aligned = args;
  aligned.a = copies.of(args.a, args.groups.row_capacity, args.b.parts * args.b.rows);
  aligned.b = copies.of(args.b);
  AlignedResult c(args.c, args.groups.row_capacity, args.b.columns, context);
  aligned.c = c.rows();
  launch<Variant<Product::input_gradient, Source::rows, Epilogue::deferred>>(
      kernel_args(aligned, context), context);
  c.finish();
  return true;
}

}  // namespace switchyard::cuda::hopper
