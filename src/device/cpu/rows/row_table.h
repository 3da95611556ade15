// SPDX-License-Identifier: Apache-2.0
// Shared by the functions that move rows by a table: the choice of kernels and stores, and the walk
// over the table.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "core/require.h"
#include "device/cpu/simd/row_kernels.h"
#include "device/device_backend.h"

namespace switchyard::cpu {

constexpr std::int64_t kCacheLine = 64;
// Smaller results are likely to be read again while they are still in a cache.
constexpr std::int64_t kStreamingBytes = 4 * 1024 * 1024;

inline const RowKernels::Typed& row_kernels_for(Dtype dtype) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16) [[unlikely]] {  // called for every row
    require<Unsupported>(false, "rows are f32 or bf16, not {}", name_of(dtype));
  }
  return dtype == Dtype::f32 ? row_kernels().f32 : row_kernels().bf16;
}

inline bool on_lines(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(kCacheLine) == 0;
}

inline Stores choose_stores(std::span<std::byte* const> bases, std::int64_t stride_bytes,
                            std::int64_t row_bytes, std::int64_t written_bytes) {
  bool fits = written_bytes >= kStreamingBytes && row_bytes % kCacheLine == 0 &&
              stride_bytes % kCacheLine == 0;
  for (const std::byte* base : bases) fits = fits && on_lines(base);
  return fits ? Stores::streaming : Stores::cached;
}

// Returns the base of an entry's buffer, from `peer_bases` if given, otherwise from `bases`.
inline std::byte* base_of(const RowTable& table, std::span<std::byte* const> bases,
                          std::byte* const* peer_bases, std::int64_t entry) {
  const auto buffer = static_cast<std::size_t>(table.buffers != nullptr ? table.buffers[entry] : 0);
  return peer_bases != nullptr ? peer_bases[buffer] : bases[buffer];
}

// Iterates over the rows that the entries of a table name, skipping the entries' empty columns.
// Rows are looked up `ahead` entries before they are used.
class NamedRows {
 public:
  struct Entry {
    int count = 0;
    std::byte** rows = nullptr;
    float* factors = nullptr;  // null if there are no factors
    int* columns = nullptr;    // the column of each row within the entry
  };

  NamedRows(const RowTable& table, const float* factors, std::int64_t row_bytes,
            std::int64_t ahead = 0)
      : table_(table),
        factors_(factors),
        row_bytes_(row_bytes),
        ahead_(ahead),
        mask_(std::bit_ceil(static_cast<std::size_t>(ahead) + 1) - 1),
        ring_(mask_ + 1),
        rows_(ring_.size() * static_cast<std::size_t>(table.width)),
        row_factors_(rows_.size()),
        columns_(rows_.size()) {
    for (std::size_t i = 0; i < ring_.size(); ++i) {
      const std::size_t first = i * static_cast<std::size_t>(table.width);
      ring_[i] = {0, rows_.data() + first,
                  factors != nullptr ? row_factors_.data() + first : nullptr,
                  columns_.data() + first};
    }
    for (std::int64_t i = 0; i < ahead; ++i) look_up(i);
  }

  // Must be called for all entries in order.
  const Entry& entry(std::int64_t i) {
    look_up(i + ahead_);
    return ring_[static_cast<std::size_t>(i) & mask_];
  }
  // Returns the entry `ahead` places after entry i; empty past the end.
  const Entry& later(std::int64_t i) const {
    return ring_[static_cast<std::size_t>(i + ahead_) & mask_];
  }

 private:
  void look_up(std::int64_t i) {
    Entry& entry = ring_[static_cast<std::size_t>(i) & mask_];
    int count = 0;
    if (i < table_.count) {
      const std::int64_t first = i * table_.width;
      for (int j = 0; j < table_.width; ++j) {
        const std::int64_t slot = table_.slots[first + j];
        if (slot < 0) continue;
        std::byte* const base = base_of(table_, table_.bases, table_.peer_bases, first + j);
        if (base == nullptr) continue;
        entry.rows[count] = base + slot * row_bytes_;
        entry.columns[count] = j;
        if (factors_ != nullptr) entry.factors[count] = factors_[first + j];
        ++count;
      }
    }
    entry.count = count;
  }

  const RowTable table_;
  const float* const factors_;
  const std::int64_t row_bytes_;
  const std::int64_t ahead_;
  const std::size_t mask_;
  std::vector<Entry> ring_;
  std::vector<std::byte*> rows_;
  std::vector<float> row_factors_;
  std::vector<int> columns_;
};

// Returns entries first … last − 1 of a table.
inline RowTable part_of(const RowTable& table, std::int64_t first, std::int64_t last) {
  RowTable part = table;
  part.count = last - first;
  part.slots += first * table.width;
  if (part.buffers != nullptr) part.buffers += first * table.width;
  return part;
}

inline const float* part_of(const float* scalars, const RowTable& table, std::int64_t first) {
  return scalars != nullptr ? scalars + first * table.width : nullptr;
}

inline float* scalar_at(std::byte* base, std::int64_t slot) {
  return reinterpret_cast<float*>(base) + slot;
}

}  // namespace switchyard::cpu
