// Converts the ids that callers give to i32, one thread per assignment.
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"

namespace switchyard::cuda {
namespace {

constexpr std::int64_t kLowestId = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kHighestId = std::numeric_limits<std::int32_t>::max();

struct IdRows {
  std::int64_t stride = 0;
  std::int64_t top_k = 1;
  std::int64_t count = 0;  // number of assignments
  bool has_sentinels = false;
  std::int64_t first_sentinel = 0;
};

template <typename Id>
__global__ void __launch_bounds__(kElementThreads)
    narrow_ids_kernel(const IdRows rows, const Id* from, std::int32_t* to) {
  for (std::int64_t i = first_element(); i < rows.count; i += element_stride()) {
    const std::int64_t token = i / rows.top_k;
    const std::int64_t id = from[token * rows.stride + (i - token * rows.top_k)];
    const bool is_sentinel = rows.has_sentinels && id >= rows.first_sentinel;
    to[i] = is_sentinel ? -1 : static_cast<std::int32_t>(max(kLowestId, min(kHighestId, id)));
  }
}

template <typename Id>
void launch_narrow_ids(const NarrowIds& args, Context& context) {
  const IdRows rows{.stride = args.from.row_stride(),
                    .top_k = args.from.shape()[1],
                    .count = args.from.shape().num_elements(),
                    .has_sentinels = args.first_sentinel.has_value(),
                    .first_sentinel = args.first_sentinel.value_or(0)};
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
