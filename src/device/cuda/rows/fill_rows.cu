// SPDX-License-Identifier: Apache-2.0
// Fills the rows of groups from their source tokens, and zeroes the padding between groups.
#include "device/cuda/kernels.h"
#include "device/cuda/rows/row_table.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kFillSteps = 4;

struct FillWork {
  const std::byte* x;
  std::int64_t x_stride;  // in bytes
  const std::int32_t* row_sources;
  std::int32_t top_k;
  const float* weights;
  const std::int32_t* row_offsets;
  const std::int32_t* group_rows;
  int groups;
  std::byte* rows;
  std::int64_t row_bytes;
  std::int64_t columns;
  float* row_weights;
  unsigned segments;  // per row
  unsigned units;
};

// Returns the group that a row, or a pad, belongs to: the last one that begins at it or before it.
__device__ int group_of(const FillWork& work, std::int64_t row) {
  int low = 0;
  int high = work.groups - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (work.row_offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Each warp fills one segment of a row.
template <typename T, bool Wide>
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ FillWork work) {
  const unsigned unit = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (unit >= work.units) return;
  const Segment<T, kFillSteps> segment(unit, work.segments);
  if (segment.row >= work.row_offsets[work.groups]) return;
  const int group = group_of(work, segment.row);
  const bool is_pad = segment.row - work.row_offsets[group] >= work.group_rows[group];
  const std::int32_t source = is_pad ? -1 : work.row_sources[segment.row];
  const T* const from =
      is_pad ? nullptr : reinterpret_cast<const T*>(work.x + source / work.top_k * work.x_stride);
  uint4 data[kFillSteps];
#pragma unroll
  for (int s = 0; s < kFillSteps; ++s) {
    data[s] = load_chunk<T, Wide, Use::again>(from, segment.column(s), work.columns, uint4{});
  }
  T* const to = reinterpret_cast<T*>(work.rows + segment.row * work.row_bytes);
#pragma unroll
  for (int s = 0; s < kFillSteps; ++s) {
    store_chunk<T, Wide, Use::once>(to, segment.column(s), work.columns, data[s]);
  }
  if (work.row_weights == nullptr || unit % work.segments != 0 || threadIdx.x % kWarp != 0) return;
  work.row_weights[segment.row] = is_pad ? 0.0F : work.weights[source];
}

template <typename T, bool Wide>
void launch_fill(const FillRows& args, Context& context) {
  FillWork work{};
  work.x = args.tokens.x.data();
  work.x_stride = args.tokens.x.row_stride_bytes();
  work.row_sources = reinterpret_cast<const std::int32_t*>(args.tokens.row_sources.data());
  work.top_k = static_cast<std::int32_t>(args.tokens.top_k);
  if (args.weights) work.weights = reinterpret_cast<const float*>(args.weights->data());
  work.row_offsets = reinterpret_cast<const std::int32_t*>(args.row_offsets.data());
  work.group_rows = reinterpret_cast<const std::int32_t*>(args.group_rows.data());
  work.groups = static_cast<int>(args.group_rows.rows());
  work.rows = args.rows.data();
  work.row_bytes = args.rows.row_bytes();
  work.columns = work.row_bytes / static_cast<std::int64_t>(sizeof(T));
  if (args.row_weights) work.row_weights = reinterpret_cast<float*>(args.row_weights->data());
  work.segments = Segment<T, kFillSteps>::per_row(work.columns);
  work.units = static_cast<unsigned>(args.rows.rows() * work.segments);
  fill_kernel<T, Wide><<<blocks_for(work.units, kWarps), kThreads, 0, context.stream()>>>(work);
  check(cudaGetLastError(), "fill_rows");
}

}  // namespace

void fill_rows(const FillRows& args, Context& context) {
  if (args.rows.rows() == 0 || args.group_rows.rows() == 0) return;
  // Only bytes are copied, so one kernel serves every dtype if rows are aligned.
  if (rows_on_chunks(args.tokens.x) && rows_on_chunks(args.rows)) {
    return launch_fill<float, true>(args, context);
  }
  return args.rows.dtype() == Dtype::bf16 ? launch_fill<__nv_bfloat16, false>(args, context)
                                          : launch_fill<float, false>(args, context);
}

}  // namespace switchyard::cuda
