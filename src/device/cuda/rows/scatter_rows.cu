// Writes rows to their places among the experts, and zeros to the rows between them: every byte is
// read once, sixteen at a time, and several of those are under way a thread.
#include <algorithm>

#include "device/cuda/kernels.h"
#include "device/cuda/rows/row_table.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kScatterSteps = 4;

struct DevicePads {
  std::byte* rows;
  float* scalars;
  const std::int32_t* row_offsets;
  const std::int32_t* group_rows;
  unsigned splits;  // blocks a group
};

template <int Bases>
struct ScatterWork {
  const std::byte* from;
  std::int64_t from_stride;  // in bytes
  std::int64_t columns;
  const float* scale;
  const float* scalars;
  unsigned segments;  // a row
  unsigned units;
  unsigned row_blocks;  // those that follow zero pads
  DevicePads pads;
  DeviceTable<Bases> to;
};

template <typename T, bool Wide>
__device__ void zero_pads(const DevicePads& pads, unsigned block, std::int64_t columns,
                          std::int64_t row_bytes) {
  const unsigned group = block / pads.splits;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const auto warp = static_cast<int>(block % pads.splits * kWarps + threadIdx.x / kWarp);
  const std::int64_t end = pads.row_offsets[group + 1];
  const std::int64_t first = pads.row_offsets[group] + pads.group_rows[group];
  for (std::int64_t r = first + warp; r < end; r += pads.splits * kWarps) {
    T* row = reinterpret_cast<T*>(pads.rows + r * row_bytes);
    for (std::int64_t c = lane * kChunkElements<T>; c < columns; c += kWarp * kChunkElements<T>) {
      store_chunk<T, Wide, Use::once>(row, c, columns, uint4{});
    }
    if (pads.scalars != nullptr && lane == 0) pads.scalars[r] = 0.0F;
  }
}

template <typename T>
__device__ uint4 scaled(uint4 chunk, float factor) {
  float values[kChunkElements<T>];
  unpack<T>(chunk, values);
#pragma unroll
  for (float& value : values) value *= factor;
  return pack<T>(values);
}

// A warp reads a segment of a row and writes it to all its places. `Width` 0 is any.
template <typename T, bool Wide, bool Scaled, int Width, int Bases>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ ScatterWork<Bases> work) {
  constexpr int kAhead = Width > 0 ? Width : 4;
  if (blockIdx.x >= work.row_blocks) {
    zero_pads<T, Wide>(work.pads, blockIdx.x - work.row_blocks, work.columns, work.to.row_bytes);
    return;
  }
  const unsigned unit = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (unit >= work.units) return;
  const Segment<T, kScatterSteps> segment(unit, work.segments);
  const auto* from = reinterpret_cast<const T*>(work.from + segment.row * work.from_stride);
  uint4 data[kScatterSteps];
#pragma unroll
  for (int s = 0; s < kScatterSteps; ++s) {
    data[s] = load_chunk<T, Wide, Use::once>(from, segment.column(s), work.columns, uint4{});
  }
  const std::int64_t width = Width > 0 ? Width : work.to.width;
  const std::int64_t first = segment.row * width;
  for (std::int64_t begin = 0; begin < width; begin += kAhead) {
    T* places[kAhead];
    float factors[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const std::int64_t entry = first + begin + j;
      const std::int32_t slot = Width > 0 || begin + j < width ? work.to.slots[entry] : -1;
      places[j] = slot < 0 ? nullptr : work.to.template row<T>(entry, slot);
      factors[j] = Scaled && slot >= 0 ? work.scale[entry] : 1.0F;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (places[j] == nullptr) continue;
#pragma unroll
      for (int s = 0; s < kScatterSteps; ++s) {
        const uint4 chunk = Scaled ? scaled<T>(data[s], factors[j]) : data[s];
        store_chunk<T, Wide, Use::once>(places[j], segment.column(s), work.columns, chunk);
      }
    }
  }
  if (work.scalars == nullptr || unit % work.segments != 0) return;
  for (std::int64_t j = threadIdx.x % kWarp; j < width; j += kWarp) {
    const std::int32_t slot = work.to.slots[first + j];
    if (slot >= 0) *work.to.scalar(first + j, slot) = work.scalars[first + j];
  }
}

// Blocks beyond those of the rows: enough to keep every multiprocessor at it where groups are few.
unsigned pad_splits(std::int64_t groups, const Context& context) {
  const std::int64_t wanted = 2 * context.num_multiprocessors();
  return static_cast<unsigned>(std::clamp<std::int64_t>(wanted / groups, 1, 32));
}

template <typename T, bool Wide, int Bases>
ScatterWork<Bases> scatter_work(const ScatterRows& args, const Context& context) {
  const std::int64_t columns = args.from.row_bytes() / static_cast<std::int64_t>(sizeof(T));
  ScatterWork<Bases> work{};
  work.from = args.from.data();
  work.from_stride = args.from.row_stride_bytes();
  work.columns = columns;
  work.scale = args.scale;
  work.scalars = args.scalars;
  work.segments = Segment<T, kScatterSteps>::per_row(columns);
  work.units = static_cast<unsigned>(args.to.count * work.segments);
  work.row_blocks = blocks_for(work.units, kWarps);
  work.to = device_table<Bases>(args.to, args.scalar_bases, args.from.row_bytes());
  if (args.pads && args.pads->group_rows.rows() > 0) {
    const auto& pads = *args.pads;
    work.pads = {pads.rows.data(),
                 pads.scalars ? reinterpret_cast<float*>(pads.scalars->data()) : nullptr,
                 reinterpret_cast<const std::int32_t*>(pads.row_offsets.data()),
                 reinterpret_cast<const std::int32_t*>(pads.group_rows.data()),
                 pad_splits(pads.group_rows.rows(), context)};
  }
  return work;
}

template <typename T, bool Wide, bool Scaled, int Width, int Bases>
void launch_scatter(const ScatterRows& args, Context& context) {
  const auto work = scatter_work<T, Wide, Bases>(args, context);
  const std::int64_t groups = args.pads ? args.pads->group_rows.rows() : 0;
  const unsigned blocks = work.row_blocks + static_cast<unsigned>(groups) * work.pads.splits;
  if (blocks == 0) return;
  scatter_kernel<T, Wide, Scaled, Width, Bases><<<blocks, kThreads, 0, context.stream()>>>(work);
  check(cudaGetLastError(), "scatter_rows");
}

// The usual widths have kernels of their own where rows are aligned and in one buffer.
template <typename T, bool Scaled>
void scatter_wide(const ScatterRows& args, Context& context) {
  if (args.to.bases.size() > 1) {
    return launch_scatter<T, true, Scaled, 0, kMostBases>(args, context);
  }
  switch (args.to.width) {
    case 1:
      return launch_scatter<T, true, Scaled, 1, 1>(args, context);
    case 2:
      return launch_scatter<T, true, Scaled, 2, 1>(args, context);
    case 4:
      return launch_scatter<T, true, Scaled, 4, 1>(args, context);
    case 8:
      return launch_scatter<T, true, Scaled, 8, 1>(args, context);
    default:
      return launch_scatter<T, true, Scaled, 0, 1>(args, context);
  }
}

template <typename T>
void scatter_typed(const ScatterRows& args, Context& context, bool wide) {
  if (args.scale != nullptr) {
    return wide ? scatter_wide<T, true>(args, context)
                : launch_scatter<T, false, true, 0, kMostBases>(args, context);
  }
  // Bytes alone: where rows are aligned, they are the same for every dtype.
  return wide ? scatter_wide<float, false>(args, context)
              : launch_scatter<T, false, false, 0, kMostBases>(args, context);
}

}  // namespace

void scatter_rows(const ScatterRows& args, Context& context) {
  require_bases(args.to, "scatter_rows to more than 256 buffers");
  const bool wide = rows_on_chunks(args.from) && rows_on_chunks(args.to, args.from.row_bytes()) &&
                    (!args.pads || on_chunks(args.pads->rows.data()));
  return args.from.dtype() == Dtype::bf16 ? scatter_typed<__nv_bfloat16>(args, context, wide)
                                          : scatter_typed<float>(args, context, wide);
}

}  // namespace switchyard::cuda
