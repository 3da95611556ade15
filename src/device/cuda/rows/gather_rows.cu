// SPDX-License-Identifier: Apache-2.0
// Sums and dot products of rows in the experts' buffers. Every byte is read once, in 16-byte loads,
// several of which are in flight per thread.
#include <algorithm>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/rows/row_table.cuh"

namespace switchyard::cuda {
namespace {

template <Buffers Where>
struct GatherWork {
  std::byte* to;
  std::int64_t to_stride;  // in bytes
  std::int64_t columns;
  const float* weights;
  float* scalars;
  std::byte* const* source_bases;
  const std::int32_t* sources;
  unsigned parts;  // blocks per token, each with a part of its columns
  DeviceTable<Where> from;
};

// The rows that are added up for a token, null where there is none, and their weights.
template <typename T>
struct Addends {
  const T** rows;
  float* weights;

  // `memory` is shared memory of bytes(width).
  __device__ Addends(void* memory, int width)
      : rows(static_cast<const T**>(memory)), weights(reinterpret_cast<float*>(rows + width)) {}
  static std::size_t bytes(std::int64_t width) {
    return static_cast<std::size_t>(width) * (sizeof(T*) + sizeof(float));
  }
};

// How many rows are read together, and how many chunks of each per thread: about eight loads in
// flight per thread.
template <int Width>
inline constexpr int kGatherAhead = Width > 0 ? Width : 8;
template <int Width>
inline constexpr int kGatherSteps = Width == 1 || Width == 2 ? 4
                                    : Width == 4             ? 2
                                                             : 1;

template <Buffers Where>
__device__ void gather_scalar(const GatherWork<Where>& work, std::int64_t entry,
                              std::int32_t slot) {
  const float* from = nullptr;
  if (slot >= 0 && work.source_bases != nullptr) {
    from = reinterpret_cast<const float*>(work.source_bases[work.from.buffers[entry]]);
    if (from != nullptr) from += work.sources[entry];
  }
  if (slot >= 0 && from == nullptr) from = work.from.scalar(entry, slot);
  work.scalars[entry] = from == nullptr ? 0.0F : *from;
}

// Looks up a token's rows and weights, and for the first part of its columns also copies its
// scalars. Returns true if there is any row. Must be called by all threads of a block.
template <typename T, Buffers Where>
__device__ bool find_addends(const GatherWork<Where>& work, std::int64_t token, unsigned part,
                             int width, const Addends<T>& addends) {
  bool found = false;
  for (int j = static_cast<int>(threadIdx.x); j < width; j += static_cast<int>(blockDim.x)) {
    const std::int64_t entry = token * width + j;
    const std::int32_t slot = work.from.slots[entry];
    const T* row = slot < 0 ? nullptr : work.from.template row<const T>(entry, slot);
    addends.rows[j] = row;
    addends.weights[j] = slot < 0 || work.weights == nullptr ? 1.0F : work.weights[entry];
    found = found || row != nullptr;
    if (work.scalars != nullptr && part == 0) gather_scalar(work, entry, slot);
  }
  return __syncthreads_or(found ? 1 : 0) != 0;
}

// Each block sums a token's rows, or a part of their columns. Sums start at −0, and a missing row
// adds −0: neither changes a bit of the result.
template <typename T, bool Wide, int Width, Buffers Where>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherWork<Where> work) {
  constexpr int kAhead = kGatherAhead<Width>;
  constexpr int kSteps = kGatherSteps<Width>;
  extern __shared__ uint4 shared_memory[];
  wait_for_earlier_kernels();
  const int width = Width > 0 ? Width : static_cast<int>(work.from.width);
  const Addends<T> addends(shared_memory, width);
  const std::int64_t token = blockIdx.x / work.parts;
  const unsigned part = blockIdx.x % work.parts;
  const bool any = find_addends(work, token, part, width, addends);
  auto* to = reinterpret_cast<T*>(work.to + token * work.to_stride);
  const int stride = static_cast<int>(blockDim.x) * kChunkElements<T>;
  std::int64_t column = static_cast<std::int64_t>(part) * kSteps * stride +
                        static_cast<int>(threadIdx.x) * kChunkElements<T>;
  for (; column < work.columns; column += static_cast<std::int64_t>(work.parts) * kSteps * stride) {
    float sums[kSteps][kChunkElements<T>];
#pragma unroll
    for (auto& sum : sums) unpack<T>(minus_zeros<T>(), sum);
    for (int begin = 0; begin < width; begin += kAhead) {
      uint4 data[kSteps][kAhead];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const T* row = Width > 0 || begin + j < width ? addends.rows[begin + j] : nullptr;
          data[s][j] = load_chunk<T, Wide, Use::once>(row, column + s * stride, work.columns,
                                                      minus_zeros<T>());
        }
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const float weight = Width > 0 || begin + j < width ? addends.weights[begin + j] : 1.0F;
          float values[kChunkElements<T>];
          unpack<T>(data[s][j], values);
#pragma unroll
          for (int e = 0; e < kChunkElements<T>; ++e) {
            sums[s][e] = __fmaf_rn(weight, values[e], sums[s][e]);
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 chunk = any ? pack<T>(sums[s]) : uint4{};
      store_chunk<T, Wide, Use::once>(to, column + s * stride, work.columns, chunk);
    }
  }
}

// Splits a token's columns into rounds that use the same number of threads.
struct GatherCut {
  unsigned threads;
  unsigned parts;  // blocks per token; more than one if there are few tokens

  GatherCut(std::int64_t chunks, int steps, std::int64_t tokens, const Context& context) {
    constexpr std::int64_t kFewThreads = 64;
    const auto divide = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
    const std::int64_t multiprocessors = context.num_multiprocessors();
    // With few tokens, small blocks spread a token over more multiprocessors.
    const std::int64_t small =
        std::min(divide(chunks, kFewThreads * steps), 2 * multiprocessors / tokens);
    const std::int64_t rounds =
        std::max({std::int64_t{1}, divide(chunks, kThreads * steps), small});
    const std::int64_t lanes = std::max<std::int64_t>(1, divide(chunks, rounds * steps));
    threads = static_cast<unsigned>(divide(lanes, kWarp) * kWarp);
    parts = static_cast<unsigned>(std::min(divide(8 * multiprocessors, tokens), rounds));
  }
};

template <typename T, bool Wide, int Width, Buffers Where>
void launch_gather(const GatherRows& args, Context& context) {
  const std::int64_t columns = args.to.shape().row_elements();
  const GatherCut cut((columns + kChunkElements<T> - 1) / kChunkElements<T>, kGatherSteps<Width>,
                      args.from.count, context);
  const GatherWork<Where> work{
      args.to.data(),
      args.to.row_stride_bytes(),
      columns,
      args.weights,
      args.scalars,
      args.peer_source_bases,
      args.sources,
      cut.parts,
      device_table<Where>(args.from, args.scalar_bases, args.peer_scalar_bases, args.to.row_bytes(),
                          context)};
  const auto blocks = static_cast<unsigned>(args.from.count * cut.parts);
  launch_early(gather_kernel<T, Wide, Width, Where>,
               {blocks, cut.threads, Addends<T>::bytes(args.from.width)}, work, "gather_rows",
               context);
}

// If rows are aligned, the usual widths have kernels of their own.
template <typename T, Buffers Where>
void gather_wide(const GatherRows& args, Context& context) {
  switch (args.from.width) {
    case 1:
      return launch_gather<T, true, 1, Where>(args, context);
    case 2:
      return launch_gather<T, true, 2, Where>(args, context);
    case 4:
      return launch_gather<T, true, 4, Where>(args, context);
    case 8:
      return launch_gather<T, true, 8, Where>(args, context);
    default:
      return launch_gather<T, true, 0, Where>(args, context);
  }
}

template <typename T>
void gather_typed(const GatherRows& args, Context& context, bool wide) {
  if (in_one_buffer(args.from)) {
    return wide ? gather_wide<T, Buffers::one>(args, context)
                : launch_gather<T, false, 0, Buffers::one>(args, context);
  }
  return wide ? gather_wide<T, Buffers::several>(args, context)
              : launch_gather<T, false, 0, Buffers::several>(args, context);
}

}  // namespace

void gather_rows(const GatherRows& args, Context& context) {
  if (args.from.count == 0) return;
  const bool wide = rows_on_chunks(args.to) && rows_on_chunks(args.from, args.to.row_bytes());
  return args.to.dtype() == Dtype::bf16 ? gather_typed<__nv_bfloat16>(args, context, wide)
                                        : gather_typed<float>(args, context, wide);
}

namespace {

template <Buffers Where>
struct DotWork {
  const std::byte* with;
  std::int64_t with_stride;  // in bytes
  std::int64_t columns;
  unsigned entries;
  float* dots;
  DeviceTable<Where> rows;
};

// Each warp computes one dot product. The elements that a lane adds, and the tree that adds the
// lanes, depend only on the number of columns, not on how they are loaded.
template <typename T, bool Wide, Buffers Where>
__global__ void __launch_bounds__(kThreads)
    dot_kernel(const __grid_constant__ DotWork<Where> work) {
  constexpr int kSteps = 4;
  constexpr int kStride = kWarp * kChunkElements<T>;
  const unsigned entry = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (entry >= work.entries) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int32_t slot = work.rows.slots[entry];
  float sum = 0.0F;
  const T* row = slot >= 0 ? work.rows.template row<const T>(entry, slot) : nullptr;
  if (row != nullptr) {
    const std::int64_t token = entry / static_cast<unsigned>(work.rows.width);
    const T* with = reinterpret_cast<const T*>(work.with + token * work.with_stride);
    for (std::int64_t c = lane * kChunkElements<T>; c < work.columns; c += kSteps * kStride) {
      uint4 a[kSteps];
      uint4 b[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        a[s] = load_chunk<T, Wide, Use::once>(row, c + s * kStride, work.columns, uint4{});
        b[s] = load_chunk<T, Wide, Use::again>(with, c + s * kStride, work.columns, uint4{});
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float x[kChunkElements<T>];
        float y[kChunkElements<T>];
        unpack<T>(a[s], x);
        unpack<T>(b[s], y);
#pragma unroll
        for (int e = 0; e < kChunkElements<T>; ++e) sum = __fmaf_rn(x[e], y[e], sum);
      }
    }
#pragma unroll
    for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(~0U, sum, o);
  }
  if (lane == 0) work.dots[entry] = sum;
}

template <typename T, bool Wide, Buffers Where>
void launch_dot(const DotRows& args, Context& context) {
  const DotWork<Where> work{
      args.with.data(),
      args.with.row_stride_bytes(),
      args.with.shape().row_elements(),
      static_cast<unsigned>(args.rows.count * args.rows.width),
      args.dots,
      device_table<Where>(args.rows, {}, nullptr, args.with.row_bytes(), context)};
  dot_kernel<T, Wide, Where>
      <<<blocks_for(work.entries, kWarps), kThreads, 0, context.stream()>>>(work);
  check(cudaGetLastError(), "dot_rows");
}

template <typename T>
void dot_typed(const DotRows& args, Context& context, bool wide) {
  if (in_one_buffer(args.rows)) {
    return wide ? launch_dot<T, true, Buffers::one>(args, context)
                : launch_dot<T, false, Buffers::one>(args, context);
  }
  return wide ? launch_dot<T, true, Buffers::several>(args, context)
              : launch_dot<T, false, Buffers::several>(args, context);
}

}  // namespace

void dot_rows(const DotRows& args, Context& context) {
  if (args.rows.count * args.rows.width == 0) return;
  const bool wide = rows_on_chunks(args.with) && rows_on_chunks(args.rows, args.with.row_bytes());
  return args.with.dtype() == Dtype::bf16 ? dot_typed<__nv_bfloat16>(args, context, wide)
                                          : dot_typed<float>(args, context, wide);
}

}  // namespace switchyard::cuda
