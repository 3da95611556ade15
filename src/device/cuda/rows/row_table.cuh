// The rows that a RowTable names, as kernels see them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "device/cuda/rows/chunk.cuh"
#include "device/cuda/runtime/context.h"
#include "device/device_backend.h"

namespace switchyard::cuda {

inline constexpr int kMostBases = 256;

// Travels as a kernel's parameter, with room for one base or for all there can be.
template <int Bases>
struct DeviceTable {
  std::int64_t width;
  const std::int32_t* slots;
  const std::int32_t* buffers;
  std::int64_t row_bytes;
  std::byte* rows[Bases];
  float* scalars[Bases];

  // Of an entry whose slot is not below 0: its buffer is meaningless otherwise.
  __device__ int base(std::int64_t entry) const {
    if constexpr (Bases == 1) {
      return 0;
    } else {
      return buffers != nullptr ? buffers[entry] : 0;
    }
  }
  template <typename T>
  __device__ T* row(std::int64_t entry, std::int32_t slot) const {
    return reinterpret_cast<T*>(rows[base(entry)] + slot * row_bytes);
  }
  __device__ float* scalar(std::int64_t entry, std::int32_t slot) const {
    return scalars[base(entry)] + slot;
  }
};

inline void require_bases(const RowTable& table, std::string_view what) {
  check(table.bases.size() <= kMostBases ? cudaSuccess : cudaErrorInvalidValue, what);
}

template <int Bases>
DeviceTable<Bases> device_table(const RowTable& table, std::span<std::byte* const> scalar_bases,
                                std::int64_t row_bytes) {
  DeviceTable<Bases> result{table.width, table.slots, table.buffers, row_bytes, {}, {}};
  for (std::size_t b = 0; b < table.bases.size() && b < Bases; ++b) result.rows[b] = table.bases[b];
  for (std::size_t b = 0; b < scalar_bases.size() && b < Bases; ++b) {
    result.scalars[b] = reinterpret_cast<float*>(scalar_bases[b]);
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

// What a warp does at a time: `Steps` chunks a lane of one row.
template <typename T, int Steps>
struct Segment {
  static constexpr int kColumns = kWarp * Steps * kChunkElements<T>;

  std::int64_t row;
  std::int64_t first;  // column of this lane

  // Units are counted in 32 bits: 2³² segments are more than a GPU's memory.
  __device__ Segment(unsigned unit, unsigned per_row)
      : row(unit / per_row),
        first(static_cast<std::int64_t>(unit % per_row) * kColumns +
              static_cast<int>(threadIdx.x % kWarp) * kChunkElements<T>) {}

  __device__ std::int64_t column(int step) const {
    return first + step * (kWarp * kChunkElements<T>);
  }

  // At least one, so that scalars travel with rows of no elements too.
  static unsigned per_row(std::int64_t columns) {
    const std::int64_t segments = (columns + kColumns - 1) / kColumns;
    return static_cast<unsigned>(segments > 0 ? segments : 1);
  }
};

inline unsigned blocks_for(std::int64_t units, int per_block) {
  return static_cast<unsigned>((units + per_block - 1) / per_block);
}

}  // namespace switchyard::cuda
