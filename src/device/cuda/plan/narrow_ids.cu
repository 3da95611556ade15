// SPDX-License-Identifier: Apache-2.0
// Converts the ids that callers give to i32, one thread per assignment.
#include <cuda_runtime.h>

#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"

namespace switchyard::cuda {
namespace {

template <typename Id>
struct IdRows {
  const Id* ids = nullptr;
  std::int64_t stride = 0;
  std::int64_t top_k = 1;
  std::int64_t count = 0;  // number of assignments
  Narrowing narrowing;
};

template <typename Id>
__global__ void __launch_bounds__(kElementThreads)
    narrow_ids_kernel(const IdRows<Id> rows, std::int32_t* to) {
  for (std::int64_t i = first_element(); i < rows.count; i += element_stride()) {
    const std::int64_t token = i / rows.top_k;
    to[i] = rows.narrowing(rows.ids[token * rows.stride + (i - token * rows.top_k)]);
  }
}

template <typename Id>
void launch_narrow_ids(const NarrowIds& args, Context& context) {
  const IdRows<Id> rows{.ids = elements<Id>(args.from),
                        .stride = args.from.row_stride(),
                        .top_k = args.from.shape()[1],
                        .count = args.from.shape().num_elements(),
                        .narrowing = Narrowing(args.first_sentinel)};
  narrow_ids_kernel<Id><<<blocks_over(rows.count, context.num_multiprocessors()), kElementThreads,
                          0, context.stream()>>>(rows, elements<std::int32_t>(args.to));
  check(cudaGetLastError(), "narrow_ids_kernel");
}

}  // namespace

void narrow_ids(const NarrowIds& args, Context& context) {
  if (args.from.bytes() == 0) return;
  if (args.from.dtype() == Dtype::i64) return launch_narrow_ids<std::int64_t>(args, context);
  launch_narrow_ids<std::int32_t>(args, context);
}

}  // namespace switchyard::cuda
