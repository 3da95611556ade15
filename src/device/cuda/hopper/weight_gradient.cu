// SPDX-License-Identifier: Apache-2.0
// C = aᵀ · b over the rows of every group, on Hopper tensor cores.
#include <algorithm>

#include "device/cuda/hopper/fits.h"
#include "device/cuda/hopper/grouped_gemm.cuh"

namespace switchyard::cuda::hopper {
namespace {

using Side = WeightGradientGemm::Side;

// A tensor map must have at least one row. If there are none the map is never used, and any aligned
// address will do.
Rows somewhere(const Rows& rows, const WeightGradientGemm& args) {
  if (args.groups.row_capacity > 0) return rows;
  const auto anywhere = reinterpret_cast<std::uintptr_t>(args.c.refs.front().data);
  return {reinterpret_cast<const void*>(anywhere / 16 * 16), rows.stride};
}

TensorLayout layout_of(const WeightGradientGemm& args, const Rows& rows, std::int64_t columns,
                       int parts) {
  const Rows there = somewhere(rows, args);
  return {.data = there.data,
          .columns = columns,
          .rows = std::max<std::int64_t>(args.groups.row_capacity, 1),
          .row_stride = there.stride,
          .parts = parts,
          .part_stride = columns};
}

// Tiles of C: `a` is the narrow side, and holds the parts.
void set_tiles(const WeightGradientGemm& args, KernelArgs& to) {
  const GroupMatrices& c = args.c;
  if (args.a.sources == nullptr) {
    to.a = tensor_map(layout_of(args, args.a, c.rows, c.parts), kBlock);
  } else {
    set_a(to, args.a, args.groups.row_capacity, c.rows, kBlock);
  }
  to.b.whole = tensor_map(layout_of(args, args.b, c.columns, 1), kBlock);
  to.part_blocks = blocks_of(c.rows, kTileRows);
  to.row_blocks = c.parts * to.part_blocks;
  to.column_blocks = blocks_of(c.columns, kTileColumns);
  to.rows = static_cast<int>(c.rows);
  to.columns = static_cast<int>(c.columns);
}

// Tiles of Cᵀ: `b` is the narrow side, and `a` holds the parts.
void set_transposed_tiles(const WeightGradientGemm& args, KernelArgs& to) {
  const GroupMatrices& c = args.c;
  if (args.b.sources == nullptr) {
    to.a = tensor_map(layout_of(args, args.b, c.columns, 1), kBlock);
  } else {
    set_a(to, args.b, args.groups.row_capacity, c.columns, kBlock);
  }
  to.b.whole = tensor_map(layout_of(args, args.a, c.rows, c.parts), kBlock);
  to.part_blocks = blocks_of(c.rows, kTileColumns);
  to.row_blocks = blocks_of(c.columns, kTileRows);
  to.column_blocks = c.parts * to.part_blocks;
  to.rows = static_cast<int>(c.columns);
  to.columns = static_cast<int>(c.rows);
}

template <typename Element>
bool have_pairs(const GroupMatrices& matrices) {
  return std::ranges::all_of(matrices.refs, [](const MatrixRef& ref) {
    return has_pairs<Element>(ref.data, ref.row_stride);
  });
}

template <Epilogue kEpilogue>
void launch_side(const WeightGradientGemm& args, const KernelArgs& to, const Context& context) {
  constexpr Product kPlain = Product::weight_gradient;
  constexpr Product kTransposed = Product::transposed_weight_gradient;
  if (args.narrow == Side::a) {
    args.a.sources == nullptr ? launch<Variant<kPlain, Source::rows, kEpilogue>>(to, context)
                              : launch<Variant<kPlain, Source::tokens, kEpilogue>>(to, context);
  } else {
    args.b.sources == nullptr
        ? launch<Variant<kTransposed, Source::rows, kEpilogue>>(to, context)
        : launch<Variant<kTransposed, Source::tokens, kEpilogue>>(to, context);
  }
}

}  // namespace

bool grouped_gemm(const WeightGradientGemm& args, Context& context) {
  if (!fits(context, args.dtype, args.c)) return false;
  if (args.groups.count == 0) return true;
  AlignedCopies copies(context);
  WeightGradientGemm aligned = args;
  aligned.a = copies.of(args.a, args.groups.row_capacity, args.c.parts * args.c.rows);
  aligned.b = copies.of(args.b, args.groups.row_capacity, args.c.columns);
  KernelArgs to = args_of(args.groups);
  args.narrow == Side::a ? set_tiles(aligned, to) : set_transposed_tiles(aligned, to);
  if (args.c_dtype == Dtype::bf16 && !args.accumulate && can_map(args.c)) {
    to.c = matrix_maps(args.c, args.groups.count, 64, context);
    launch_side<Epilogue::deferred>(aligned, to, context);
    return true;
  }
  to.c_matrices = context.table(args.c.refs);
  to.c_is_f32 = args.c_dtype == Dtype::f32;
  to.c_has_pairs = to.c_is_f32 ? have_pairs<float>(args.c) : have_pairs<__nv_bfloat16>(args.c);
  to.accumulate = args.accumulate;
  launch_side<Epilogue::direct>(aligned, to, context);
  return true;
}

}  // namespace switchyard::cuda::hopper
