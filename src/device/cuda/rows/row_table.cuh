// SPDX-License-Identifier: Apache-2.0
// The rows that a RowTable names, in the form that kernels use.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "device/cuda/rows/chunk.cuh"
#include "device/cuda/runtime/context.h"
#include "device/device_backend.h"

namespace switchyard::cuda {

// Whether all rows of a table are in one buffer, whose address is a kernel parameter, or in
// several, whose addresses kernels read from memory.
enum class Buffers : bool { one, several };

template <Buffers Where>
struct DeviceTable {
  std::int64_t width;
  const std::int32_t* slots;
  const std::int32_t* buffers;
  std::int64_t row_bytes;
  std::byte* rows;
  float* scalars;
  std::byte* const* bases;
  std::byte* const* scalar_bases;

  // Returns the row of an entry, or null if its buffer is missing. `slot` must not be negative: the
  // entry's buffer is meaningless then.
  template <typename T>
  __device__ T* row(std::int64_t entry, std::int32_t slot) const {
    std::byte* base = rows;
    if constexpr (Where == Buffers::several) {
      base = bases[buffers != nullptr ? buffers[entry] : 0];
      if (base == nullptr) return nullptr;
    }
    return reinterpret_cast<T*>(base + slot * row_bytes);
  }
  __device__ float* scalar(std::int64_t entry, std::int32_t slot) const {
    float* base = scalars;
    if constexpr (Where == Buffers::several) {
      base = reinterpret_cast<float*>(scalar_bases[buffers != nullptr ? buffers[entry] : 0]);
      if (base == nullptr) return nullptr;
    }
    return base + slot;
  }
};

inline bool in_one_buffer(const RowTable& table) {
  return table.peer_bases == nullptr && table.bases.size() <= 1;
}

// Uploads the host's pointers if they are not in device memory yet.
template <Buffers Where>
DeviceTable<Where> device_table(const RowTable& table, std::span<std::byte* const> scalar_bases,
                                std::byte* const* peer_scalar_bases, std::int64_t row_bytes,
                                Context& context) {
  DeviceTable<Where> result{table.width, table.slots, table.buffers,    row_bytes,
                            nullptr,     nullptr,     table.peer_bases, peer_scalar_bases};
  if constexpr (Where == Buffers::one) {
    if (!table.bases.empty()) result.rows = table.bases[0];
    if (!scalar_bases.empty()) result.scalars = reinterpret_cast<float*>(scalar_bases[0]);
  } else if (table.peer_bases == nullptr) {
    const auto on_device = [&](std::span<std::byte* const> bases) {
      return bases.empty() ? nullptr
                           : static_cast<std::byte* const*>(context.constant(std::as_bytes(bases)));
    };
    result.bases = on_device(table.bases);
    result.scalar_bases = on_device(scalar_bases);
  }
  return result;
}

inline bool rows_on_chunks(const RowTable& table, std::int64_t row_bytes) {
  bool fits = row_bytes % kChunkBytes == 0;
  for (const std::byte* base : table.bases) fits = fits && on_chunks(base);
  return fits;
}

template <typename View>
bool rows_on_chunks(const View& view) {
  return on_chunks(view.data()) && view.row_bytes() % kChunkBytes == 0 &&
         view.row_stride_bytes() % kChunkBytes == 0;
}

// The piece of a row that a warp processes at a time: `Steps` chunks per lane.
template <typename T, int Steps>
struct Segment {
  static constexpr int kColumns = kWarp * Steps * kChunkElements<T>;

  std::int64_t row;
  std::int64_t first;  // first column of this lane

  // 32 bits are enough for units: 2³² segments would not fit into a GPU's memory.
  __device__ Segment(unsigned unit, unsigned per_row)
      : row(unit / per_row),
        first(static_cast<std::int64_t>(unit % per_row) * kColumns +
              static_cast<int>(threadIdx.x % kWarp) * kChunkElements<T>) {}

  __device__ std::int64_t column(int step) const {
    return first + step * (kWarp * kChunkElements<T>);
  }

  // Returns at least one, so that scalars travel even with rows that have no elements.
  static unsigned per_row(std::int64_t columns) {
    const std::int64_t segments = (columns + kColumns - 1) / kColumns;
    return static_cast<unsigned>(segments > 0 ? segments : 1);
  }
};

inline unsigned blocks_for(std::int64_t units, int per_block) {
  return static_cast<unsigned>((units + per_block - 1) / per_block);
}

}  // namespace switchyard::cuda
