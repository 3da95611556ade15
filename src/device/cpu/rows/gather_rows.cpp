// Moves rows by a table: picks the instruction set, the kind of stores, and walks the table.
#include <algorithm>
#include <array>
#include <bit>
#include <span>
#include <vector>

#include "core/require.h"
#include "device/cpu/kernels.h"
#include "device/cpu/rows/row_scalars.h"
#include "device/cpu/simd/row_kernels.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kLine = 64;
// Less than this is likely to be read again while it is still in a cache.
constexpr std::int64_t kStreamingBytes = 4 * 1024 * 1024;
constexpr std::int64_t kAheadBytes = 32 * 1024;

const RowKernels::Typed& kernels_for(Dtype dtype) {
  require<Unsupported>(dtype == Dtype::f32 || dtype == Dtype::bf16, "rows are f32 or bf16, not {}",
                       name_of(dtype));
  return dtype == Dtype::f32 ? row_kernels().f32 : row_kernels().bf16;
}

bool on_lines(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(kLine) == 0;
}

Stores choose_stores(std::span<std::byte* const> bases, std::int64_t stride_bytes,
                     std::int64_t row_bytes, std::int64_t written_bytes) {
  bool fits =
      written_bytes >= kStreamingBytes && row_bytes % kLine == 0 && stride_bytes % kLine == 0;
  for (const std::byte* base : bases) fits = fits && on_lines(base);
  return fits ? Stores::streaming : Stores::cached;
}

// How far ahead to fetch rows, in entries: far enough for memory to answer.
std::int64_t entries_ahead(std::int64_t entry_bytes) {
  return std::clamp<std::int64_t>(kAheadBytes / std::max<std::int64_t>(entry_bytes, 1), 1, 64);
}

// The rows that the entries of a table name, in order and without the gaps; looked up some entries
// before they are used.
class NamedRows {
 public:
  struct Entry {
    int count = 0;
    std::byte** rows = nullptr;
    float* factors = nullptr;  // null if the table has none
    int* columns = nullptr;    // where in the entry each row is named
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

  // Entries are asked for in order.
  const Entry& entry(std::int64_t i) {
    look_up(i + ahead_);
    return ring_[static_cast<std::size_t>(i) & mask_];
  }
  // The entry that comes `ahead` later; empty beyond the end.
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
        const int buffer = table_.buffers != nullptr ? table_.buffers[first + j] : 0;
        entry.rows[count] = table_.bases[static_cast<std::size_t>(buffer)] + slot * row_bytes_;
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

// Entries first … last − 1 of a table.
RowTable part_of(const RowTable& table, std::int64_t first, std::int64_t last) {
  RowTable part = table;
  part.count = last - first;
  part.slots += first * table.width;
  if (part.buffers != nullptr) part.buffers += first * table.width;
  return part;
}

const float* part_of(const float* scalars, const RowTable& table, std::int64_t first) {
  return scalars != nullptr ? scalars + first * table.width : nullptr;
}

void scatter_part(const ScatterRows& args, std::int64_t first, std::int64_t last, Stores stores) {
  const auto& kernels = row_kernels();
  const auto& typed = kernels_for(args.from.dtype());
  const auto row_bytes = args.from.row_bytes();
  const auto elements = args.from.shape().row_elements();
  NamedRows named(part_of(args.to, first, last), part_of(args.scale, args.to, first), row_bytes);
  for (std::int64_t i = first; i < last; ++i) {
    const auto& to = named.entry(i - first);
    if (args.scale != nullptr) {
      typed.scale(to.rows, to.factors, to.count, args.from.row(i), elements, stores);
    } else {
      kernels.copy(to.rows, to.count, args.from.row(i), row_bytes, stores);
    }
  }
  kernels.publish();
}

void gather_part(const GatherRows& args, std::int64_t first, std::int64_t last, Stores stores) {
  const auto& typed = kernels_for(args.to.dtype());
  const auto row_bytes = args.to.row_bytes();
  const auto elements = args.to.shape().row_elements();
  NamedRows named(part_of(args.from, first, last), part_of(args.weights, args.from, first),
                  row_bytes, entries_ahead(args.from.width * row_bytes));
  for (std::int64_t i = first; i < last; ++i) {
    const auto& from = named.entry(i - first);
    const auto& later = named.later(i - first);
    typed.sum(args.to.row(i),
              {.rows = from.rows,
               .weights = from.factors,
               .count = from.count,
               .later_rows = later.rows,
               .later_count = later.count},
              elements, stores);
  }
  row_kernels().publish();
}

void dot_part(const DotRows& args, std::int64_t first, std::int64_t last) {
  const auto& typed = kernels_for(args.with.dtype());
  const auto elements = args.with.shape().row_elements();
  NamedRows named(part_of(args.rows, first, last), nullptr, args.with.row_bytes());
  for (std::int64_t i = first; i < last; ++i) {
    float* dots = args.dots + i * args.rows.width;
    std::fill_n(dots, args.rows.width, 0.0F);
    const auto& rows = named.entry(i - first);
    for (int c = 0; c < rows.count; ++c) {
      dots[rows.columns[c]] = typed.dot(args.with.row(i), rows.rows[c], elements);
    }
  }
}

}  // namespace

void scatter_rows(const ScatterRows& args, Workers& workers) {
  const auto row_bytes = args.from.row_bytes();
  const Stores stores =
      choose_stores(args.to.bases, row_bytes, row_bytes, args.to.count * args.to.width * row_bytes);
  workers.split(args.to.count, [&](std::int64_t first, std::int64_t last) {
    scatter_part(args, first, last, stores);
    if (args.scalars != nullptr) scatter_scalars(args, first, last);
  });
  if (args.pads) zero_pads(*args.pads);
}

void gather_rows(const GatherRows& args, Workers& workers) {
  const auto row_bytes = args.to.row_bytes();
  const std::array<std::byte*, 1> base{args.to.data()};
  const Stores stores =
      choose_stores(base, args.to.row_stride_bytes(), row_bytes, args.from.count * row_bytes);
  workers.split(args.from.count, [&](std::int64_t first, std::int64_t last) {
    gather_part(args, first, last, stores);
    if (args.scalars != nullptr) gather_scalars(args, first, last);
  });
}

void dot_rows(const DotRows& args, Workers& workers) {
  workers.split(args.rows.count,
                [&](std::int64_t first, std::int64_t last) { dot_part(args, first, last); });
}

}  // namespace switchyard::cpu
