// What goes with rows that are moved: a scalar each, and the pads between them.
#pragma once

#include "core/row_bytes.h"
#include "device/device_backend.h"

namespace switchyard::cpu {

inline float* scalar_at(std::span<std::byte* const> bases, const RowTable& table,
                        std::int64_t entry) {
  const int buffer = table.buffers != nullptr ? table.buffers[entry] : 0;
  return reinterpret_cast<float*>(bases[static_cast<std::size_t>(buffer)]) + table.slots[entry];
}

// Of entries first … last − 1, as the next.
inline void scatter_scalars(const ScatterRows& args, std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first * args.to.width; i < last * args.to.width; ++i) {
    if (args.to.slots[i] >= 0) *scalar_at(args.scalar_bases, args.to, i) = args.scalars[i];
  }
}

inline void gather_scalars(const GatherRows& args, std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first * args.from.width; i < last * args.from.width; ++i) {
    const bool named = args.from.slots[i] >= 0;
    args.scalars[i] = named ? *scalar_at(args.scalar_bases, args.from, i) : 0.0F;
  }
}

inline void zero_pads(const PadRows& pads) {
  const auto offsets = pads.row_offsets.span<std::int32_t>();
  const auto group_rows = pads.group_rows.span<std::int32_t>();
  for (std::size_t e = 0; e < group_rows.size(); ++e) {
    const std::int64_t begin = offsets[e] + group_rows[e];
    zero_rows(pads.rows.slice(begin, offsets[e + 1]));
    if (pads.scalars) zero_rows(pads.scalars->slice(begin, offsets[e + 1]));
  }
}

}  // namespace switchyard::cpu
