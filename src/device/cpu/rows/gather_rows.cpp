// SPDX-License-Identifier: Apache-2.0
// Sums the rows that a table names, or computes their dot products with other rows.
#include <algorithm>
#include <array>

#include "device/cpu/kernels.h"
#include "device/cpu/rows/row_table.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kAheadBytes = 32 * 1024;

// Returns how many entries ahead to prefetch rows, enough to hide the latency of memory.
std::int64_t entries_ahead(std::int64_t entry_bytes) {
  return std::clamp<std::int64_t>(kAheadBytes / std::max<std::int64_t>(entry_bytes, 1), 1, 64);
}

void gather_part(const GatherRows& args, std::int64_t first, std::int64_t last, Stores stores) {
  const auto& typed = row_kernels_for(args.to.dtype());
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

void gather_scalars(const GatherRows& args, std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first * args.from.width; i < last * args.from.width; ++i) {
    const auto slot = args.from.slots[i];
    args.scalars[i] = 0.0F;
    if (slot < 0) continue;
    std::byte* const by_source =
        args.peer_source_bases != nullptr ? args.peer_source_bases[args.from.buffers[i]] : nullptr;
    if (by_source != nullptr) {
      args.scalars[i] = *scalar_at(by_source, args.sources[i]);
      continue;
    }
    std::byte* const base = base_of(args.from, args.scalar_bases, args.peer_scalar_bases, i);
    if (base != nullptr) args.scalars[i] = *scalar_at(base, slot);
  }
}

void dot_part(const DotRows& args, std::int64_t first, std::int64_t last) {
  const auto& typed = row_kernels_for(args.with.dtype());
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
