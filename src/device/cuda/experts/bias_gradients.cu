// SPDX-License-Identifier: Apache-2.0
// The gradients of biases, and what biases add to the gradients of the routing weights. Column sums
// over the rows of a group are taken within chunks first, then over the chunks in order.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "device/cuda/experts/lines.cuh"
#include "device/cuda/experts/row_passes.h"
#include "device/cuda/experts/row_teams.cuh"
#include "device/cuda/portable/gemm_tile.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kChunkRows = 512;  // counted from the group's first row
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

// Returns the index of a group's first chunk in the sums. Each group gets one spare chunk, so that
// groups never share one wherever they begin.
__device__ std::int64_t first_chunk(const Groups& groups, int group) {
  return std::int64_t{groups.row_offsets[group] / kChunkRows} + group;
}
std::int64_t num_chunks(const Groups& groups) {
  return groups.row_capacity / kChunkRows + groups.count;
}

// The rows of a chunk, possibly none. rows_of_chunk() must be called by all lanes of a warp
// together.
struct ChunkRows {
  std::int64_t first;
  int count;
};
__device__ ChunkRows rows_of_chunk(const Groups& groups, std::int64_t chunk) {
  const int group =
      last_at_most(groups.count, chunk, [&](int g) { return first_chunk(groups, g); });
  const std::int64_t skipped = (chunk - first_chunk(groups, group)) * kChunkRows;
  const std::int64_t left = groups.group_rows[group] - skipped;
  if (skipped < 0 || left <= 0) return {0, 0};
  return {groups.row_offsets[group] + skipped,
          static_cast<int>(min(left, std::int64_t{kChunkRows}))};
}

template <typename T>
struct SumChunks {
  Groups groups;
  Lines lines;
  SourceRows rows;
  RowNumbers<const float> row_weights;
  float* sums;  // out [chunks, columns]
};

// One block per chunk and 32 lines. Each warp sums every eighth row; the warps' sums are then added
// in order.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_chunks_kernel(const SumChunks<T> args) {
  constexpr int kColumns = 32 * Line<T>::kElements;
  __shared__ float warp_sums[kWarps][kColumns];
  const auto chunk = std::int64_t{blockIdx.x};
  const ChunkRows rows = rows_of_chunk(args.groups, chunk);
  if (rows.count == 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int line = static_cast<int>(blockIdx.y) * 32 + lane;
  float sums[Line<T>::kElements] = {};
  if (line < args.lines.count) {
#pragma unroll 4
    for (int r = warp; r < rows.count; r += kWarps) {
      const std::int64_t row = rows.first + r;
      const float weight = number_or_one(args.row_weights, row);
      const Line<T> value = args.lines.load(row_of<T>(args.rows, row), line);
#pragma unroll
      for (int i = 0; i < Line<T>::kElements; ++i) sums[i] += weight * value.get(i);
    }
  }
#pragma unroll
  for (int i = 0; i < Line<T>::kElements; ++i) {
    warp_sums[warp][lane * Line<T>::kElements + i] = sums[i];
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  const int to = static_cast<int>(blockIdx.y) * kColumns + column;
  if (column >= kColumns || to >= args.lines.width) return;
  float total = 0.0F;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += warp_sums[w][column];
  args.sums[chunk * args.lines.width + to] = total;
}

// Address and dtype of a bias gradient. It has no padding: tables are cached by their bytes.
struct BiasRef {
  void* data = nullptr;
  std::int64_t is_f32 = 0;
};

struct AddChunks {
  Groups groups;
  int columns;  // parts · width
  int width;
  const float* sums;
  const BiasRef* gradients;  // [parts, groups]
  bool accumulate;
};

__global__ void __launch_bounds__(kThreads) add_chunks_kernel(const AddChunks args) {
  const int group = static_cast<int>(blockIdx.x);
  const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (column >= args.columns) return;
  const int part = column / args.width;
  const BiasRef to = args.gradients[part * args.groups.count + group];
  const int rows = args.groups.group_rows[group];
  if (to.data == nullptr || (rows == 0 && args.accumulate)) return;
  const float* sums = args.sums + first_chunk(args.groups, group) * args.columns + column;
  float total = 0.0F;
#pragma unroll 4
  for (int first = 0; first < rows; first += kChunkRows, sums += args.columns) total += *sums;
  const int place = column - part * args.width;
  if (to.is_f32 != 0) {
    gemm::put(static_cast<float*>(to.data)[place], total, args.accumulate);
  } else {
    gemm::put(static_cast<__nv_bfloat16*>(to.data)[place], total, args.accumulate);
  }
}

void sum_chunks(const BiasGradients& args, float* sums, Context& context) {
  if (args.groups.row_capacity == 0) return;
  for_dtype(args.dtype, [&]<typename T>(T) {
    const std::int64_t columns = args.parts * args.width;
    const SumChunks<T> kernel{.groups = args.groups,
                              .lines = lines_of<T>(columns, args.rows),
                              .rows = args.rows,
                              .row_weights = args.row_weights,
                              .sums = sums};
    const dim3 grid(static_cast<unsigned>(num_chunks(args.groups)),
                    static_cast<unsigned>((kernel.lines.count + 31) / 32));
    sum_chunks_kernel<T><<<grid, kThreads, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "sum_chunks");
  });
}

template <typename T>
struct BiasDotsKernel {
  Groups groups;
  Lines lines;
  int warps;
  SourceRows rows;
  const MatrixRef* bias;  // [groups]
  RowNumbers<float> sums;
};

template <typename T>
__global__ void __launch_bounds__(kTeamBlock) bias_dots_kernel(const BiasDotsKernel<T> args) {
  for_each_row(args.groups, args.warps, [&](std::int64_t row, int group, int thread) {
    const auto* const bias = static_cast<const T*>(args.bias[group].data);
    if (bias == nullptr) return;
    const T* const from = row_of<T>(args.rows, row);
    float sum = 0.0F;
    for (int line = thread; line < args.lines.count; line += args.warps * 32) {
      const Line<T> value = args.lines.load(from, line);
      const Line<T> factor = args.lines.template load<false>(bias, line);
#pragma unroll
      for (int i = 0; i < Line<T>::kElements; ++i) sum += value.get(i) * factor.get(i);
    }
    sum = team_sum(sum, args.warps);
    if (thread == 0) number_of(args.sums, row) += sum;
  });
}

}  // namespace

void add_bias_dots(const BiasDots& args, Context& context) {
  if (args.groups.count == 0 || args.groups.row_capacity == 0) return;
  for_dtype(args.dtype, [&]<typename T>(T) {
    const Lines lines = lines_of<T>(args.width, args.rows, args.bias);
    const int warps = team_warps(lines.count);
    const BiasDotsKernel<T> kernel{.groups = args.groups,
                                   .lines = lines,
                                   .warps = warps,
                                   .rows = args.rows,
                                   .bias = context.table(args.bias),
                                   .sums = args.sums};
    bias_dots_kernel<T>
        <<<team_blocks(args.groups, warps, context), kTeamBlock, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "bias_dots");
  });
}

void bias_gradients(const BiasGradients& args, Context& context) {
  std::vector<BiasRef> refs;
  for (const TensorView& gradient : args.gradients) {
    refs.push_back({gradient.data(), gradient.dtype() == Dtype::f32 ? 1 : 0});
  }
  if (std::ranges::all_of(refs, [](const BiasRef& ref) { return ref.data == nullptr; })) return;
  const std::int64_t columns = args.parts * args.width;
  const TensorView sums = context.take({num_chunks(args.groups), columns}, Dtype::f32);
  sum_chunks(args, reinterpret_cast<float*>(sums.data()), context);
  const dim3 grid(static_cast<unsigned>(args.groups.count),
                  static_cast<unsigned>((columns + kThreads - 1) / kThreads));
  const AddChunks kernel{
      .groups = args.groups,
      .columns = static_cast<int>(columns),
      .width = static_cast<int>(args.width),
      .sums = reinterpret_cast<const float*>(sums.data()),
      .gradients = static_cast<const BiasRef*>(context.constant(std::as_bytes(std::span(refs)))),
      .accumulate = args.accumulate};
  add_chunks_kernel<<<grid, kThreads, 0, context.stream()>>>(kernel);
  check(cudaGetLastError(), "add_chunks");
}

}  // namespace switchyard::cuda
