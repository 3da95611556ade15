// SPDX-License-Identifier: Apache-2.0
// Writes rows to their slots in the experts' buffers, and zeros to the padding between groups.
// Every byte is read once, in 16-byte loads, several of which are in flight per thread.
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
  unsigned splits;  // blocks per group
};

template <Buffers Where>
struct ScatterWork {
  const std::byte* from;
  std::int64_t from_stride;  // in bytes
  std::int64_t columns;
  const float* scale;
  const float* scalars;
  unsigned segments;  // per row
  unsigned units;
  unsigned row_blocks;  // the blocks after these zero the pads
  DevicePads pads;
  Beside beside;
  DeviceTable<Where> to;
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

// Sends the weights and sources that go along with one token. Called by a warp.
__device__ void send_beside(const Beside& beside, const DeviceTable<Buffers::several>& to,
                            std::int64_t first, std::int64_t width) {
  const std::int64_t lane = threadIdx.x % kWarp;
  if (beside.sources != nullptr) {
    for (std::int64_t j = lane; j < width; j += kWarp) {
      const std::int32_t source = beside.sources[first + j];
      std::byte* base = source >= 0 ? beside.source_bases[to.buffers[first + j]] : nullptr;
      if (base == nullptr) continue;
      reinterpret_cast<std::int32_t*>(base)[beside.source_slots[first + j]] = source;
    }
  }
  if (beside.weights == nullptr) return;
  for (std::int64_t j = 0; j < width; ++j) {
    const std::int32_t place = to.slots[first + j];
    std::byte* base = place >= 0 ? beside.weight_bases[to.buffers[first + j]] : nullptr;
    if (base == nullptr) continue;
    float* row = reinterpret_cast<float*>(base) + place * width;
    for (std::int64_t k = lane; k < width; k += kWarp) row[k] = beside.weights[first + k];
  }
}

// Each warp reads one segment of a row and writes it to all its destinations. `Width` 0 means any
// width.
template <typename T, bool Wide, bool Scaled, int Width, Buffers Where>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ ScatterWork<Where> work) {
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
  if (unit % work.segments != 0) return;
  if (work.scalars != nullptr) {
    for (std::int64_t j = threadIdx.x % kWarp; j < width; j += kWarp) {
      const std::int32_t slot = work.to.slots[first + j];
      float* to = slot >= 0 ? work.to.scalar(first + j, slot) : nullptr;
      if (to != nullptr) *to = work.scalars[first + j];
    }
  }
  if constexpr (Where == Buffers::several) send_beside(work.beside, work.to, first, width);
}

// Returns how many blocks zero the pads of each group: enough to keep all multiprocessors busy even
// if there are few groups.
unsigned pad_splits(std::int64_t groups, const Context& context) {
  const std::int64_t wanted = 2 * context.num_multiprocessors();
  return static_cast<unsigned>(std::clamp<std::int64_t>(wanted / groups, 1, 32));
}

template <typename T, bool Wide, Buffers Where>
ScatterWork<Where> scatter_work(const ScatterRows& args, Context& context) {
  const std::int64_t columns = args.from.row_bytes() / static_cast<std::int64_t>(sizeof(T));
  ScatterWork<Where> work{};
  work.from = args.from.data();
  work.from_stride = args.from.row_stride_bytes();
  work.columns = columns;
  work.scale = args.scale;
  work.scalars = args.scalars;
  work.segments = Segment<T, kScatterSteps>::per_row(columns);
  work.units = static_cast<unsigned>(args.to.count * work.segments);
  work.row_blocks = blocks_for(work.units, kWarps);
  work.to = device_table<Where>(args.to, args.scalar_bases, args.peer_scalar_bases,
                                args.from.row_bytes(), context);
  if (args.beside) work.beside = *args.beside;
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

template <typename T, bool Wide, bool Scaled, int Width, Buffers Where>
void launch_scatter(const ScatterRows& args, Context& context) {
  const auto work = scatter_work<T, Wide, Where>(args, context);
  const std::int64_t groups = args.pads ? args.pads->group_rows.rows() : 0;
  const unsigned blocks = work.row_blocks + static_cast<unsigned>(groups) * work.pads.splits;
  if (blocks == 0) return;
  scatter_kernel<T, Wide, Scaled, Width, Where><<<blocks, kThreads, 0, context.stream()>>>(work);
  check(cudaGetLastError(), "scatter_rows");
}

// If rows are aligned, the usual widths have kernels of their own.
template <typename T, bool Scaled, Buffers Where>
void scatter_wide(const ScatterRows& args, Context& context) {
  switch (args.to.width) {
    case 1:
      return launch_scatter<T, true, Scaled, 1, Where>(args, context);
    case 2:
      return launch_scatter<T, true, Scaled, 2, Where>(args, context);
    case 4:
      return launch_scatter<T, true, Scaled, 4, Where>(args, context);
    case 8:
      return launch_scatter<T, true, Scaled, 8, Where>(args, context);
    default:
      return launch_scatter<T, true, Scaled, 0, Where>(args, context);
  }
}

template <typename T, bool Scaled>
void scatter_wide(const ScatterRows& args, Context& context) {
  if (in_one_buffer(args.to)) return scatter_wide<T, Scaled, Buffers::one>(args, context);
  if constexpr (Scaled) return launch_scatter<T, true, true, 0, Buffers::several>(args, context);
  return scatter_wide<T, Scaled, Buffers::several>(args, context);
}

template <typename T, bool Scaled>
void scatter_apart(const ScatterRows& args, Context& context) {
  return in_one_buffer(args.to)
             ? launch_scatter<T, false, Scaled, 0, Buffers::one>(args, context)
             : launch_scatter<T, false, Scaled, 0, Buffers::several>(args, context);
}

template <typename T>
void scatter_typed(const ScatterRows& args, Context& context, bool wide) {
  if (args.scale != nullptr) {
    return wide ? scatter_wide<T, true>(args, context) : scatter_apart<T, true>(args, context);
  }
  // Only bytes are copied, so one kernel serves every dtype if rows are aligned.
  return wide ? scatter_wide<float, false>(args, context) : scatter_apart<T, false>(args, context);
}

}  // namespace

void scatter_rows(const ScatterRows& args, Context& context) {
  const bool wide = rows_on_chunks(args.from) && rows_on_chunks(args.to, args.from.row_bytes()) &&
                    (!args.pads || on_chunks(args.pads->rows.data()));
  return args.from.dtype() == Dtype::bf16 ? scatter_typed<__nv_bfloat16>(args, context, wide)
                                          : scatter_typed<float>(args, context, wide);
}

}  // namespace switchyard::cuda
