// SPDX-License-Identifier: Apache-2.0
// Decides which products the Hopper kernels accept, and fills in the arguments they share.
#pragma once

#include <algorithm>
#include <span>

#include "device/cuda/hopper/aligned_copies.h"
#include "device/cuda/hopper/kernel_args.h"

namespace switchyard::cuda::hopper {

// True if the Hopper kernels run here and accept a [rows, columns] matrix. Depends on dtype and
// sizes alone, never on the number of groups or the alignment of tensors.
inline bool fits(const Context& context, Dtype dtype, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kSmallest = 64;
  const auto can_tile = [](std::int64_t n) { return n % 8 == 0 && n >= kSmallest; };
  return context.uses_hopper_kernels() && dtype == Dtype::bf16 && can_tile(rows) &&
         can_tile(columns);
}
inline bool fits(const Context& context, Dtype dtype, const GroupMatrices& matrices) {
  return fits(context, dtype, matrices.rows, matrices.columns);
}

// True if two adjacent elements can be stored in one access, in every row.
template <typename Element>
bool has_pairs(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % (2 * sizeof(Element)) == 0 && stride % 2 == 0;
}

inline int blocks_of(std::int64_t size, int block) {
  return static_cast<int>((size + block - 1) / block);
}

// Sets A [R, columns]: a tensor map over the rows, or the tokens to gather them from.
inline void set_a(KernelArgs& args, const SourceRows& rows, std::int64_t num_rows,
                  std::int64_t columns, int box_rows) {
  if (rows.sources == nullptr) {
    args.a = tensor_map(
        {.data = rows.data, .columns = columns, .rows = num_rows, .row_stride = rows.stride},
        box_rows);
    return;
  }
  args.tokens = {.data = rows.data,
                 .stride = static_cast<std::uint32_t>(rows.stride * 2),
                 .columns = static_cast<int>(columns),
                 .sources = rows.sources,
                 .top_k = Divisor(static_cast<std::uint32_t>(rows.top_k))};
}

inline bool has_bias(std::span<const MatrixRef> bias) {
  return std::ranges::any_of(bias, [](const MatrixRef& ref) { return ref.data != nullptr; });
}

inline KernelArgs args_of(const Groups& groups) {
  KernelArgs args;
  args.row_offsets = groups.row_offsets;
  args.group_rows = groups.group_rows;
  args.groups = groups.count;
  args.tickets = groups.tickets;
  args.group_order = groups.order;
  return args;
}

}  // namespace switchyard::cuda::hopper
