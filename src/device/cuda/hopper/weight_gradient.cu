// C = aᵀ · b over the rows of every group, by the tensor cores of Hopper.
#include <algorithm>

#include "device/cuda/hopper/fits.h"
#include "device/cuda/hopper/grouped_gemm.cuh"

namespace switchyard::cuda::hopper {
namespace {

// A map of no rows cannot be made; where there are none it is not used, and any memory will do.
TensorLayout rows_of(const WeightGradientGemm& args, const Rows& rows, std::int64_t columns) {
  const bool empty = args.groups.row_capacity == 0;
  return {.data = empty ? args.c.refs.front().data : rows.data,
          .columns = columns,
          .rows = std::max<std::int64_t>(args.groups.row_capacity, 1),
          .row_stride = rows.stride};
}

KernelArgs kernel_args(const WeightGradientGemm& args) {
  KernelArgs to = args_of(args.groups);
  TensorLayout a = rows_of(args, args.a, args.c.rows);
  a.parts = args.c.parts;
  a.part_stride = args.c.rows;
  to.a = tensor_map(a, kBlock);
  to.b.whole = tensor_map(rows_of(args, args.b, args.c.columns), kBlock);
  to.part_blocks = blocks_of(args.c.rows, kTileRows);
  to.row_blocks = args.c.parts * to.part_blocks;
  to.column_blocks = blocks_of(args.c.columns, kTileColumns);
  to.rows = static_cast<int>(args.c.rows);
  to.columns = static_cast<int>(args.c.columns);
  return to;
}

}  // namespace

bool grouped_gemm(const WeightGradientGemm& args, Context& context) {
  if (!fits(context, args.dtype, args.c) || !can_map(args.a) || !can_map(args.b)) return false;
  if (args.groups.count == 0) return true;
  KernelArgs to = kernel_args(args);
  if (args.c_dtype == Dtype::bf16 && !args.accumulate) {
    to.c = matrix_maps(args.c, args.groups.count, 64, context);
    launch<Product::weight_gradient, Epilogue::deferred>(to, context);
    return true;
  }
  to.c_matrices = context.table(args.c.refs);
  to.accumulate = args.accumulate;
  if (args.c_dtype == Dtype::bf16) {
    launch<Product::weight_gradient, Epilogue::direct_bf16>(to, context);
  } else {
    launch<Product::weight_gradient, Epilogue::direct_f32>(to, context);
  }
  return true;
}

}  // namespace switchyard::cuda::hopper
