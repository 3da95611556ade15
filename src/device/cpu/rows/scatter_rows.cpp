// SPDX-License-Identifier: Apache-2.0
// Writes rows, and one scalar with each, to the places that a table names.
#include <algorithm>

#include "core/row_bytes.h"
#include "device/cpu/kernels.h"
#include "device/cpu/rows/row_table.h"

namespace switchyard::cpu {
namespace {

void scatter_part(const ScatterRows& args, std::int64_t first, std::int64_t last, Stores stores) {
  const auto& kernels = row_kernels();
  const auto& typed = row_kernels_for(args.from.dtype());
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

void scatter_scalars(const ScatterRows& args, std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first * args.to.width; i < last * args.to.width; ++i) {
    const auto slot = args.to.slots[i];
    if (slot < 0) continue;
    std::byte* const base = base_of(args.to, args.scalar_bases, args.peer_scalar_bases, i);
    if (base != nullptr) *scalar_at(base, slot) = args.scalars[i];
  }
}

void send_beside(const Beside& beside, const RowTable& to, std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first * to.width; i < last * to.width; ++i) {
    const std::int64_t token = i / to.width * to.width;
    if (beside.weights != nullptr && to.slots[i] >= 0) {
      std::byte* const base = beside.weight_bases[to.buffers[i]];
      if (base != nullptr) {
        std::copy_n(beside.weights + token, to.width, scalar_at(base, to.slots[i] * to.width));
      }
    }
    if (beside.sources != nullptr && beside.sources[i] >= 0) {
      std::byte* const base = beside.source_bases[to.buffers[i]];
      if (base != nullptr) {
        reinterpret_cast<std::int32_t*>(base)[beside.source_slots[i]] = beside.sources[i];
      }
    }
  }
}

void zero_pads(const PadRows& pads) {
  const auto offsets = pads.row_offsets.span<std::int32_t>();
  const auto group_rows = pads.group_rows.span<std::int32_t>();
  for (std::size_t e = 0; e < group_rows.size(); ++e) {
    const std::int64_t begin = offsets[e] + group_rows[e];
    zero_rows(pads.rows.slice(begin, offsets[e + 1]));
    if (pads.scalars) zero_rows(pads.scalars->slice(begin, offsets[e + 1]));
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
    if (args.beside) send_beside(*args.beside, args.to, first, last);
  });
  if (args.pads) zero_pads(*args.pads);
}

}  // namespace switchyard::cpu
