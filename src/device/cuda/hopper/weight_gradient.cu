// C = aᵀ · b over the rows of every group, by the tensor cores of Hopper.
#include <algorithm>

#include "device/cuda/hopper/fits.h"
#include "device/cuda/hopper/grouped_gemm.cuh"

namespace switchyard::cuda::hopper {
namespace {

// A map of no rows cannot be made; where there are none it is not used, and any aligned memory
// will do.
TensorLayout rows_of(const WeightGradientGemm& args, const Rows& rows, std::int64_t columns) {
  const bool empty = args.groups.row_capacity == 0;
  const auto anywhere = reinterpret_cast<std::uintptr_t>(args.c.refs.front().data);
  return {.data = empty ? reinterpret_cast<const void*>(anywhere / 16 * 16) : rows.data,
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

template <typename Element>
bool have_pairs(const GroupMatrices& matrices) {
  return std::ranges::all_of(matrices.refs, [](const MatrixRef& ref) {
    return has_pairs<Element>(ref.data, ref.row_stride);
  });
}

}  // namespace

bool grouped_gemm(const WeightGradientGemm& args, Context& context) {
  if (!fits(context, args.dtype, args.c)) return false;
  if (args.groups.count == 0) return true;
  AlignedCopies copies(context);
  WeightGradientGemm aligned = args;
  aligned.a = {copies.of(args.a, args.groups.row_capacity, args.c.parts * args.c.rows)};
  aligned.b = {copies.of(args.b, args.groups.row_capacity, args.c.columns)};
  KernelArgs to = kernel_args(aligned);
  if (args.c_dtype == Dtype::bf16 && !args.accumulate && can_map(args.c)) {
    to.c = matrix_maps(args.c, args.groups.count, 64, context);
    launch<Product::weight_gradient, Epilogue::deferred>(to, context);
    return true;
  }
  to.c_matrices = context.table(args.c.refs);
  to.accumulate = args.accumulate;
  if (args.c_dtype == Dtype::bf16) {
    to.c_has_pairs = have_pairs<__nv_bfloat16>(args.c);
    launch<Product::weight_gradient, Epilogue::direct_bf16>(to, context);
  } else {
    to.c_has_pairs = have_pairs<float>(args.c);
    launch<Product::weight_gradient, Epilogue::direct_f32>(to, context);
  }
  return true;
}

}  // namespace switchyard::cuda::hopper
