// SPDX-License-Identifier: Apache-2.0
// Elementwise passes over the rows of groups: scaling them at the input, gathering them from
// tokens and adding them to others.
#include <cuda_runtime.h>

#include "device/cuda/experts/lines.cuh"
#include "device/cuda/experts/row_passes.h"
#include "device/cuda/experts/row_teams.cuh"

namespace switchyard::cuda {
namespace {

template <typename T>
struct RowsKernel {
  Groups groups;
  Lines lines;
  int warps;
  T* from;
  std::int64_t from_stride;
  T* to;
  std::int64_t to_stride;
  const float* row_weights;
  float* d_row_weights;
  const std::int32_t* sources;
  int top_k;
};

template <typename T>
__global__ void __launch_bounds__(kTeamBlock) weigh_kernel(const RowsKernel<T> args) {
  for_each_row(args.groups, args.warps, [&](std::int64_t row, int /*group*/, int thread) {
    const float weight = args.row_weights[row];
    for (int line = thread; line < args.lines.count; line += args.warps * 32) {
      Line<T> value = args.lines.load(args.from + row * args.from_stride, line);
#pragma unroll
      for (int i = 0; i < Line<T>::kElements; ++i) value.set(i, weight * value.get(i));
      args.lines.store(args.to + row * args.to_stride, line, value);
    }
  });
}

// `from` holds the rows, `to` their gradients.
template <typename T>
__global__ void __launch_bounds__(kTeamBlock) weigh_backward_kernel(const RowsKernel<T> args) {
  for_each_row(args.groups, args.warps, [&](std::int64_t row, int /*group*/, int thread) {
    const float weight = args.row_weights[row];
    T* const x_row = args.from + row * args.from_stride;
    T* const d_x_row = args.to + row * args.to_stride;
    float sum = 0.0F;
    for (int line = thread; line < args.lines.count; line += args.warps * 32) {
      Line<T> x = args.lines.load(x_row, line);
      Line<T> d_x = args.lines.load(d_x_row, line);
#pragma unroll
      for (int i = 0; i < Line<T>::kElements; ++i) {
        sum += d_x.get(i) * x.get(i);
        x.set(i, weight * x.get(i));
        d_x.set(i, weight * d_x.get(i));
      }
      args.lines.store(x_row, line, x);
      args.lines.store(d_x_row, line, d_x);
    }
    if (args.d_row_weights == nullptr) return;
    sum = team_sum(sum, args.warps);
    if (thread == 0) args.d_row_weights[row] = sum;
  });
}

// Each thread keeps several lines in flight.
template <typename T>
__global__ void __launch_bounds__(kTeamBlock) gather_kernel(const RowsKernel<T> args) {
  constexpr int kAtOnce = 4;
  for_each_row(args.groups, args.warps, [&](std::int64_t row, int /*group*/, int thread) {
    const std::int64_t token = args.sources[row] / args.top_k;
    const T* const from = args.from + token * args.from_stride;
    const int step = args.warps * 32;
    for (int first = thread; first < args.lines.count; first += kAtOnce * step) {
      Line<T> values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int line = first + i * step;
        if (line < args.lines.count) values[i] = args.lines.template load<false>(from, line);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int line = first + i * step;
        if (line >= args.lines.count) continue;
        args.lines.store(args.to + row * args.to_stride, line, values[i]);
      }
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kTeamBlock) add_kernel(const RowsKernel<T> args) {
  for_each_row(args.groups, args.warps, [&](std::int64_t row, int /*group*/, int thread) {
    T* const to_row = args.to + row * args.to_stride;
    for (int line = thread; line < args.lines.count; line += args.warps * 32) {
      const Line<T> more = args.lines.load(args.from + row * args.from_stride, line);
      Line<T> value = args.lines.load(to_row, line);
#pragma unroll
      for (int i = 0; i < Line<T>::kElements; ++i) value.set(i, value.get(i) + more.get(i));
      args.lines.store(to_row, line, value);
    }
  });
}

struct RowsPass {
  Dtype dtype;
  Groups groups;
  std::int64_t width;
  Rows from;
  Rows to;
  const float* row_weights = nullptr;
  float* d_row_weights = nullptr;
  const std::int32_t* sources = nullptr;
  int top_k = 1;
};

// Calls launch(kernel arguments, number of blocks).
template <typename Launch>
void for_rows(const RowsPass& pass, Context& context, Launch launch) {
  if (pass.groups.count == 0 || pass.groups.row_capacity == 0) return;
  for_dtype(pass.dtype, [&]<typename T>(T) {
    const Lines lines = lines_of<T>(pass.width, pass.from, pass.to);
    const int warps = team_warps(lines.count);
    const RowsKernel<T> kernel{.groups = pass.groups,
                               .lines = lines,
                               .warps = warps,
                               .from = data_of<T>(pass.from),
                               .from_stride = pass.from.stride,
                               .to = data_of<T>(pass.to),
                               .to_stride = pass.to.stride,
                               .row_weights = pass.row_weights,
                               .d_row_weights = pass.d_row_weights,
                               .sources = pass.sources,
                               .top_k = pass.top_k};
    launch(kernel, team_blocks(pass.groups, warps, context));
  });
}

}  // namespace

void weigh_rows(const WeighRows& args, Context& context) {
  const RowsPass pass{args.dtype, args.groups, args.width, args.from, args.to, args.row_weights};
  for_rows(pass, context, [&]<typename T>(const RowsKernel<T>& kernel, unsigned blocks) {
    weigh_kernel<T><<<blocks, kTeamBlock, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "weigh_rows");
  });
}

void weigh_rows_backward(const WeighRowsBackward& args, Context& context) {
  const RowsPass pass{args.dtype, args.groups,      args.width,        args.x,
                      args.d_x,   args.row_weights, args.d_row_weights};
  for_rows(pass, context, [&]<typename T>(const RowsKernel<T>& kernel, unsigned blocks) {
    weigh_backward_kernel<T><<<blocks, kTeamBlock, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "weigh_rows_backward");
  });
}

void rows_from_tokens(const RowsFromTokens& args, Context& context) {
  const RowsPass pass{.dtype = args.dtype,
                      .groups = args.groups,
                      .width = args.width,
                      .from = args.from,
                      .to = args.to,
                      .sources = args.from.sources,
                      .top_k = args.from.top_k};
  for_rows(pass, context, [&]<typename T>(const RowsKernel<T>& kernel, unsigned blocks) {
    gather_kernel<T><<<blocks, kTeamBlock, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "rows_from_tokens");
  });
}

void add_rows(const AddRows& args, Context& context) {
  const RowsPass pass{args.dtype, args.groups, args.width, args.from, args.to};
  for_rows(pass, context, [&]<typename T>(const RowsKernel<T>& kernel, unsigned blocks) {
    add_kernel<T><<<blocks, kTeamBlock, 0, context.stream()>>>(kernel);
    check(cudaGetLastError(), "add_rows");
  });
}

}  // namespace switchyard::cuda
