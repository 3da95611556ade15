// Converts the ids that callers give to i32, one thread per assignment.
#include <cuda_runtime.h>

#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"

namespace switchyard::cuda {
namespace {

template <typename Id>
__global__ void __launch_bounds__(kElementThreads)
    narrow_ids_kernel(const IdRows rows, const Id* from, std::int32_t* to) {
  for (std::int64_t i = first_element(); i < rows.count; i += element_stride()) {
    to[i] = narrowed_id(rows, from, i);
  }
}

template <typename Id>
void launch_narrow_ids(const NarrowIds& args, Context& context) {
  const IdRows rows = id_rows(args.from, args.first_sentinel);
  narrow_ids_kernel<Id>
      <<<blocks_over(rows.count, context.num_multiprocessors()), kElementThreads, 0,
         context.stream()>>>(rows, elements<Id>(args.from), elements<std::int32_t>(args.to));
  check(cudaGetLastError(), "narrow_ids_kernel");
}

}  // namespace

void narrow_ids(const NarrowIds& args, Context& context) {
  if (args.from.bytes() == 0) return;
  if (args.from.dtype() == Dtype::i64) return launch_narrow_ids<std::int64_t>(args, context);
  launch_narrow_ids<std::int32_t>(args, context);
}

}  // namespace switchyard::cuda
