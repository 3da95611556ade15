// SPDX-License-Identifier: Apache-2.0
// Launches the grouped products; one source file per dtype instantiates them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "device/cuda/portable/gemm_problems.cuh"
#include "device/cuda/portable/portable_gemm.h"

namespace switchyard::cuda::portable {

template <Dtype kDtype>
using ElementOf = std::conditional_t<kDtype == Dtype::f32, float, __nv_bfloat16>;

// True if every row begins on a 16-byte boundary, and so does each part within a row.
template <Dtype kDtype>
bool rows_are_aligned(const Rows& rows, int parts, std::int64_t part_columns) {
  constexpr auto kBytes = size_of(kDtype);
  return gemm::is_aligned(rows.data, rows.stride * kBytes) &&
         (parts == 1 || part_columns * kBytes % 16 == 0);
}

template <Dtype kDtype>
void grouped_gemm(const ForwardGemm& args, Context& context) {
  if (args.groups.count == 0) return;
  const bool aligned = rows_are_aligned<kDtype>(args.a, 1, args.b.columns) &&
                       gemm::are_aligned(args.b.refs, size_of(kDtype));
  const auto column_tiles = args.b.parts * gemm::num_tiles(args.b.rows, gemm::kTileColumns);
  gemm::launch<true, true>(gemm::ForwardTiles<ElementOf<kDtype>>(args, context), aligned,
                           gemm::persistent_blocks(args.groups, column_tiles, context), context);
}

template <Dtype kDtype>
void grouped_gemm(const InputGradientGemm& args, Context& context) {
  if (args.groups.count == 0) return;
  const bool aligned = rows_are_aligned<kDtype>(args.a, args.b.parts, args.b.rows) &&
                       gemm::are_aligned(args.b.refs, size_of(kDtype));
  const auto column_tiles = gemm::num_tiles(args.b.columns, gemm::kTileColumns);
  gemm::launch<true, false>(gemm::InputGradientTiles<ElementOf<kDtype>>(args, context), aligned,
                            gemm::persistent_blocks(args.groups, column_tiles, context), context);
}

// Launches one block per tile: groups differ in rows, and the hardware scheduler balances the load.
template <Dtype kDtype>
void grouped_gemm(const WeightGradientGemm& args, Context& context) {
  if (args.groups.count == 0) return;
  const bool aligned = rows_are_aligned<kDtype>(args.a, args.c.parts, args.c.rows) &&
                       rows_are_aligned<kDtype>(args.b, 1, args.c.columns);
  const auto tiles = args.groups.count * args.c.parts *
                     gemm::num_tiles(args.c.rows, gemm::kTileRows) *
                     gemm::num_tiles(args.c.columns, gemm::kTileColumns);
  gemm::launch<false, false>(gemm::WeightGradientTiles<ElementOf<kDtype>>(args, context), aligned,
                             tiles, context);
}

}  // namespace switchyard::cuda::portable
