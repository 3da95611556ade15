// Moves rows by a table: picks the instruction set, the kind of stores, and walks the table.
#include "device/cpu/rows.h"

#include <algorithm>
#include <array>
#include <span>

#include "core/require.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kLine = 64;
// Less than this is likely to be read again while it is still in a cache.
constexpr std::int64_t kStreamingBytes = 4 * 1024 * 1024;
constexpr std::int64_t kAheadBytes = 16 * 1024;
constexpr int kMaxWidth = 1024;  // rows named by one entry of a table

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

// The rows that entry i of a table names, in order, and their factors if there are any; none beyond
// the table's end.
struct NamedRows {
  std::array<std::byte*, kMaxWidth> rows;
  std::array<float, kMaxWidth> factors;
  std::array<std::int64_t, kMaxWidth> columns;
  int count = 0;

  void collect(const RowTable& table, std::int64_t i, std::int64_t row_bytes,
               const float* table_factors) {
    count = 0;
    if (i >= table.count) return;
    for (std::int64_t j = 0; j < table.width; ++j) {
      const std::int64_t entry = i * table.width + j;
      const std::int64_t slot = table.slots[entry];
      if (slot < 0) continue;
      const auto buffer = table.buffers != nullptr ? table.buffers[entry] : 0;
      const auto c = static_cast<std::size_t>(count++);
      rows[c] = table.bases[static_cast<std::size_t>(buffer)] + slot * row_bytes;
      columns[c] = j;
      if (table_factors != nullptr) factors[c] = table_factors[entry];
    }
  }
};

// How far ahead to fetch rows, in entries: far enough for memory to answer.
std::int64_t entries_ahead(std::int64_t entry_bytes) {
  return std::clamp<std::int64_t>(kAheadBytes / std::max<std::int64_t>(entry_bytes, 1), 1, 64);
}

void require_width(const RowTable& table) {
  require<Unsupported>(table.width <= kMaxWidth, "a token has {} picks, at most {} are supported",
                       table.width, int{kMaxWidth});
}

}  // namespace

const RowKernels& row_kernels() {
#if defined(__x86_64__)
  static const RowKernels& best = [&]() -> const RowKernels& {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
      return kRowKernels_avx512;
    }
    return __builtin_cpu_supports("avx2") ? kRowKernels_avx2 : kRowKernels_baseline;
  }();
  return best;
#else
  return kRowKernels_baseline;
#endif
}

void scatter_rows(const ScatterRows& args) {
  require_width(args.to);
  const auto& kernels = row_kernels();
  const auto& typed = kernels_for(args.from.dtype());
  const auto row_bytes = args.from.row_bytes();
  const auto elements = args.from.shape().row_elements();
  const Stores stores =
      choose_stores(args.to.bases, row_bytes, row_bytes, args.to.count * args.to.width * row_bytes);
  NamedRows to;
  for (std::int64_t i = 0; i < args.to.count; ++i) {
    to.collect(args.to, i, row_bytes, args.scale);
    if (args.scale != nullptr) {
      typed.scale(to.rows.data(), to.factors.data(), to.count, args.from.row(i), elements, stores);
    } else {
      kernels.copy(to.rows.data(), to.count, args.from.row(i), row_bytes, stores);
    }
  }
  kernels.publish();
}

void gather_rows(const GatherRows& args) {
  require_width(args.from);
  const auto& typed = kernels_for(args.to.dtype());
  const auto row_bytes = args.to.row_bytes();
  const auto elements = args.to.shape().row_elements();
  const std::array<std::byte*, 1> base{args.to.data()};
  const Stores stores =
      choose_stores(base, args.to.row_stride_bytes(), row_bytes, args.from.count * row_bytes);
  const auto distance = entries_ahead(args.from.width * row_bytes);
  NamedRows from;
  NamedRows later;
  for (std::int64_t i = 0; i < args.from.count; ++i) {
    from.collect(args.from, i, row_bytes, args.weights);
    later.collect(args.from, i + distance, row_bytes, nullptr);
    typed.sum(args.to.row(i),
              {.rows = from.rows.data(),
               .weights = args.weights != nullptr ? from.factors.data() : nullptr,
               .count = from.count,
               .later_rows = later.rows.data(),
               .later_count = later.count},
              elements, stores);
  }
  row_kernels().publish();
}

void dot_rows(const DotRows& args) {
  require_width(args.rows);
  const auto& typed = kernels_for(args.with.dtype());
  const auto elements = args.with.shape().row_elements();
  NamedRows rows;
  for (std::int64_t i = 0; i < args.rows.count; ++i) {
    float* dots = args.dots + i * args.rows.width;
    for (std::int64_t j = 0; j < args.rows.width; ++j) dots[j] = 0.0F;
    rows.collect(args.rows, i, args.with.row_bytes(), nullptr);
    for (int c = 0; c < rows.count; ++c) {
      const auto place = static_cast<std::size_t>(c);
      dots[rows.columns[place]] = typed.dot(args.with.row(i), rows.rows[place], elements);
    }
  }
}

}  // namespace switchyard::cpu
