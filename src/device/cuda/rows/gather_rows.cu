// Sums and products of rows that lie among those of the experts: every byte is read once, sixteen
// at a time, and several of those are under way a thread.
#include "device/cuda/kernels.h"
#include "device/cuda/rows/row_table.cuh"

namespace switchyard::cuda {
namespace {

template <int Bases>
struct GatherWork {
  std::byte* to;
  std::int64_t to_stride;  // in bytes
  std::int64_t columns;
  const float* weights;
  float* scalars;
  unsigned segments;  // a row
  unsigned units;
  DeviceTable<Bases> from;
};

// Rows that are read together, and chunks of each a lane: about eight loads under way a thread.
template <int Width>
inline constexpr int kGatherAhead = Width > 0 ? Width : 8;
template <int Width>
inline constexpr int kGatherSteps = Width == 1 || Width == 2 ? 4
                                    : Width == 4             ? 2
                                                             : 1;

template <int Bases>
__device__ void gather_scalars(const GatherWork<Bases>& work, std::int64_t first,
                               std::int64_t width) {
  for (std::int64_t j = threadIdx.x % kWarp; j < width; j += kWarp) {
    const std::int32_t slot = work.from.slots[first + j];
    work.scalars[first + j] = slot < 0 ? 0.0F : *work.from.scalar(first + j, slot);
  }
}

// A warp sums a segment of a row. Sums begin with −0, and where no row is named −0 is added: both
// leave every bit of what is there.
template <typename T, bool Wide, int Width, int Bases>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherWork<Bases> work) {
  constexpr int kAhead = kGatherAhead<Width>;
  constexpr int kSteps = kGatherSteps<Width>;
  const unsigned unit = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (unit >= work.units) return;
  const Segment<T, kSteps> segment(unit, work.segments);
  const std::int64_t width = Width > 0 ? Width : work.from.width;
  const std::int64_t first = segment.row * width;
  float sums[kSteps][kChunkElements<T>];
#pragma unroll
  for (auto& sum : sums) unpack<T>(minus_zeros<T>(), sum);
  bool any = false;
  for (std::int64_t begin = 0; begin < width; begin += kAhead) {
    const T* rows[kAhead];
    float weights[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const std::int64_t entry = first + begin + j;
      const std::int32_t slot = Width > 0 || begin + j < width ? work.from.slots[entry] : -1;
      rows[j] = slot < 0 ? nullptr : work.from.template row<const T>(entry, slot);
      weights[j] = slot < 0 || work.weights == nullptr ? 1.0F : work.weights[entry];
      any = any || slot >= 0;
    }
    uint4 data[kSteps][kAhead];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        data[s][j] = load_chunk<T, Wide, Use::once>(rows[j], segment.column(s), work.columns,
                                                    minus_zeros<T>());
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        float values[kChunkElements<T>];
        unpack<T>(data[s][j], values);
#pragma unroll
        for (int e = 0; e < kChunkElements<T>; ++e) {
          sums[s][e] = __fmaf_rn(weights[j], values[e], sums[s][e]);
        }
      }
    }
  }
  auto* to = reinterpret_cast<T*>(work.to + segment.row * work.to_stride);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint4 chunk = any ? pack<T>(sums[s]) : uint4{};
    store_chunk<T, Wide, Use::again>(to, segment.column(s), work.columns, chunk);
  }
  if (work.scalars != nullptr && unit % work.segments == 0) gather_scalars(work, first, width);
}

template <typename T, bool Wide, int Width, int Bases>
void launch_gather(const GatherRows& args, Context& context) {
  const std::int64_t columns = args.to.shape().row_elements();
  const unsigned segments = Segment<T, kGatherSteps<Width>>::per_row(columns);
  const GatherWork<Bases> work{
      args.to.data(),
      args.to.row_stride_bytes(),
      columns,
      args.weights,
      args.scalars,
      segments,
      static_cast<unsigned>(args.from.count * segments),
      device_table<Bases>(args.from, args.scalar_bases, args.to.row_bytes())};
  gather_kernel<T, Wide, Width, Bases>
      <<<blocks_for(work.units, kWarps), kThreads, 0, context.stream()>>>(work);
  check(cudaGetLastError(), "gather_rows");
}

template <typename T>
void gather_typed(const GatherRows& args, Context& context, bool wide) {
  if (!wide) return launch_gather<T, false, 0, kMostBases>(args, context);
  if (args.from.bases.size() > 1) return launch_gather<T, true, 0, kMostBases>(args, context);
  switch (args.from.width) {
    case 1:
      return launch_gather<T, true, 1, 1>(args, context);
    case 2:
      return launch_gather<T, true, 2, 1>(args, context);
    case 4:
      return launch_gather<T, true, 4, 1>(args, context);
    case 8:
      return launch_gather<T, true, 8, 1>(args, context);
    default:
      return launch_gather<T, true, 0, 1>(args, context);
  }
}

}  // namespace

void gather_rows(const GatherRows& args, Context& context) {
  if (args.from.count == 0) return;
  require_bases(args.from, "gather_rows from more than 256 buffers");
  const bool wide = rows_on_chunks(args.to) && rows_on_chunks(args.from, args.to.row_bytes());
  return args.to.dtype() == Dtype::bf16 ? gather_typed<__nv_bfloat16>(args, context, wide)
                                        : gather_typed<float>(args, context, wide);
}

namespace {

template <int Bases>
struct DotWork {
  const std::byte* with;
  std::int64_t with_stride;  // in bytes
  std::int64_t columns;
  unsigned entries;
  float* dots;
  DeviceTable<Bases> rows;
};

// A warp makes one product. A lane's elements and the tree that adds the lanes depend on the number
// of columns alone, not on how they are loaded.
template <typename T, bool Wide, int Bases>
__global__ void __launch_bounds__(kThreads)
    dot_kernel(const __grid_constant__ DotWork<Bases> work) {
  constexpr int kSteps = 4;
  constexpr int kStride = kWarp * kChunkElements<T>;
  const unsigned entry = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (entry >= work.entries) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int32_t slot = work.rows.slots[entry];
  float sum = 0.0F;
  if (slot >= 0) {
    const T* row = work.rows.template row<const T>(entry, slot);
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

template <typename T, bool Wide, int Bases>
void launch_dot(const DotRows& args, Context& context) {
  const DotWork<Bases> work{args.with.data(),
                            args.with.row_stride_bytes(),
                            args.with.shape().row_elements(),
                            static_cast<unsigned>(args.rows.count * args.rows.width),
                            args.dots,
                            device_table<Bases>(args.rows, {}, args.with.row_bytes())};
  dot_kernel<T, Wide, Bases>
      <<<blocks_for(work.entries, kWarps), kThreads, 0, context.stream()>>>(work);
  check(cudaGetLastError(), "dot_rows");
}

template <typename T>
void dot_typed(const DotRows& args, Context& context, bool wide) {
  if (!wide) return launch_dot<T, false, kMostBases>(args, context);
  return args.rows.bases.size() > 1 ? launch_dot<T, true, kMostBases>(args, context)
                                    : launch_dot<T, true, 1>(args, context);
}

}  // namespace

void dot_rows(const DotRows& args, Context& context) {
  if (args.rows.count * args.rows.width == 0) return;
  require_bases(args.rows, "dot_rows with more than 256 buffers");
  const bool wide = rows_on_chunks(args.with) && rows_on_chunks(args.rows, args.with.row_bytes());
  return args.with.dtype() == Dtype::bf16 ? dot_typed<__nv_bfloat16>(args, context, wide)
                                          : dot_typed<float>(args, context, wide);
}

}  // namespace switchyard::cuda
