// SPDX-License-Identifier: Apache-2.0
// Fills the rows of groups from the tokens that they name.
#include <algorithm>
#include <array>

#include "core/row_bytes.h"
#include "device/cpu/kernels.h"
#include "device/cpu/rows/row_table.h"

namespace switchyard::cpu {
namespace {

void fill_row(const FillRows& args, std::int64_t r, Stores stores) {
  const auto source = args.tokens.row_sources.span<std::int32_t>()[static_cast<std::size_t>(r)];
  const std::array<std::byte*, 1> to{args.rows.row(r)};
  row_kernels().copy(to.data(), 1, args.tokens.x.row(source / args.tokens.top_k),
                     args.rows.row_bytes(), stores);
  if (!args.row_weights) return;
  args.row_weights->span<float>()[static_cast<std::size_t>(r)] =
      args.weights->span<float>()[static_cast<std::size_t>(source)];
}

// Fills rows first … last − 1, which must lie within groups.
void fill_part(const FillRows& args, std::int64_t first, std::int64_t last, Stores stores) {
  const auto offsets = args.row_offsets.span<std::int32_t>();
  const auto group_rows = args.group_rows.span<std::int32_t>();
  std::size_t g = 0;
  for (std::int64_t r = first; r < last;) {
    while (offsets[g + 1] <= r) ++g;
    const std::int64_t end = std::min<std::int64_t>(offsets[g + 1], last);
    const std::int64_t pads = std::min<std::int64_t>(offsets[g] + group_rows[g], end);
    for (; r < pads; ++r) fill_row(args, r, stores);
    zero_rows(args.rows.slice(r, end));
    if (args.row_weights) zero_rows(args.row_weights->slice(r, end));
    r = end;
  }
  row_kernels().publish();
}

}  // namespace

void fill_rows(const FillRows& args, Workers& workers) {
  const std::int64_t count = args.row_offsets.span<std::int32_t>().back();
  const auto row_bytes = args.rows.row_bytes();
  const std::array<std::byte*, 1> base{args.rows.data()};
  const Stores stores = choose_stores(base, row_bytes, row_bytes, count * row_bytes);
  workers.split(
      count, [&](std::int64_t first, std::int64_t last) { fill_part(args, first, last, stores); });
}

}  // namespace switchyard::cpu
