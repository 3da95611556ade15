// Which products the kernels of Hopper take, and what all of them are told.
#pragma once

#include "device/cuda/hopper/aligned_copies.h"
#include "device/cuda/hopper/kernel_args.h"

namespace switchyard::cuda::hopper {

// Compiled for anything but sm_90a, that is also for plain sm_90, the kernels are empty.
#if defined(SWITCHYARD_NO_HOPPER_KERNELS)
constexpr bool kHasKernels = false;
#else
constexpr bool kHasKernels = true;
#endif

// By dtype and sizes alone: the same however many groups there are, and wherever tensors lie.
inline bool fits(const Context& context, Dtype dtype, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kSmallest = 64;
  const auto can_tile = [](std::int64_t n) { return n % 8 == 0 && n >= kSmallest; };
  return kHasKernels && context.uses_hopper_kernels() && dtype == Dtype::bf16 && can_tile(rows) &&
         can_tile(columns);
}
inline bool fits(const Context& context, Dtype dtype, const GroupMatrices& matrices) {
  return fits(context, dtype, matrices.rows, matrices.columns);
}

// Whether two neighbours can be stored at once, in all rows.
template <typename Element>
bool has_pairs(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % (2 * sizeof(Element)) == 0 && stride % 2 == 0;
}

inline int blocks_of(std::int64_t size, int block) {
  return static_cast<int>((size + block - 1) / block);
}

// [R, columns]: as a map, or to be read from tokens.
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

inline KernelArgs args_of(const Groups& groups) {
  KernelArgs args;
  args.row_offsets = groups.row_offsets;
  args.group_rows = groups.group_rows;
  args.groups = groups.count;
  return args;
}

}  // namespace switchyard::cuda::hopper
