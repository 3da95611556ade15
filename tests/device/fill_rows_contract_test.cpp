// SPDX-License-Identifier: Apache-2.0
// Rows from received tokens on every device against plain loops.
#include <gtest/gtest.h>

#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/devices.h"
#include "support/device/row_sizes.h"
#include "support/random.h"

namespace switchyard::testing::fill_rows_contract_test {
namespace {

class RowsFillContract : public OnDevices {
 protected:
  void fill_groups(const RowSizes& s, bool weighted) const;
};
SWITCHYARD_ON_DEVICES(RowsFillContract);

// Groups with many pads, none, nothing but pads and nothing at all. What pads and rows beyond the
// groups name is no token.
void RowsFillContract::fill_groups(const RowSizes& s, bool weighted) const {
  SCOPED_TRACE(text_of(s));
  const std::vector<std::int32_t> row_offsets{0, 0, 70, 72, 72, 100, 102, 102};
  const std::vector<std::int32_t> group_rows{0, 65, 2, 0, 0, 1, 0};
  const Tensor x = Random(3).tensor({s.count, s.hidden + s.apart}, s.dtype);
  const Tensor weights = Random(4).tensor({s.count, s.width}, Dtype::f32);
  std::vector<std::int32_t> sources(105, 2000000000);
  Tensor rows = poisoned({105, s.hidden}, s.dtype);
  Tensor row_weights = poisoned({105}, Dtype::f32);
  Tensor device_rows = put(rows);
  Tensor device_row_weights = put(row_weights);
  Random random(5);
  for (std::size_t g = 0; g < group_rows.size(); ++g) {
    for (auto r = row_offsets[g]; r < row_offsets[g + 1]; ++r) {
      const bool is_pad = r >= row_offsets[g] + group_rows[g];
      const auto source = is_pad ? 0 : random.below(s.count * s.width);
      if (!is_pad) sources[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(source);
      for (std::int64_t c = 0; c < s.hidden; ++c) {
        set_at(rows, r, c, is_pad ? 0.0F : value_at(x, source / s.width, c));
      }
      if (!weighted) continue;
      row_weights.span<float>()[static_cast<std::size_t>(r)] =
          is_pad ? 0.0F : weights.span<float>()[static_cast<std::size_t>(source)];
    }
  }
  Tensor device_x = put(x);
  const Tensor device_weights = put(weights);
  const Tensor device_sources = put(Tensor::from<std::int32_t>({105}, sources));
  const Tensor device_offsets = put(Tensor::from<std::int32_t>({8}, row_offsets));
  const Tensor device_group_rows = put(Tensor::from<std::int32_t>({7}, group_rows));
  FillRows args{
      .tokens = {.x = cut(device_x, s.hidden), .row_sources = device_sources, .top_k = s.width},
      .row_offsets = device_offsets,
      .group_rows = device_group_rows,
      .rows = device_rows};
  if (weighted) args.weights = device_weights;
  if (weighted) args.row_weights = device_row_weights;
  backend_of(device).fill_rows(args);
  EXPECT_TRUE(same_bits(get(device_rows), rows));
  EXPECT_TRUE(same_bits(get(device_row_weights), row_weights));
}

TEST_P(RowsFillContract, FillMakesTheRowsOfGroupsAndZeroesTheirPads) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const std::int64_t hidden : {1, 33, 72, 1000, 2056}) {
      for (const std::int64_t apart : {0, 3, 8}) {
        const RowSizes sizes{
            .count = 9, .width = 1 + apart, .hidden = hidden, .apart = apart, .dtype = dtype};
        fill_groups(sizes, false);
        fill_groups(sizes, true);
      }
    }
  }
}

TEST_P(RowsFillContract, FillOfNoRows) {
  const Tensor x = put(Tensor::zeros({3, 8}, Dtype::f32));
  const Tensor none = put(Tensor({0}, Dtype::i32));
  Tensor rows = put(poisoned({2, 8}, Dtype::f32));
  for (const std::int64_t num_groups : {0, 4}) {
    const Tensor offsets = put(Tensor::zeros({num_groups + 1}, Dtype::i32));
    const Tensor group_rows = put(Tensor::zeros({num_groups}, Dtype::i32));
    for (const std::int64_t num_rows : {0, 2}) {
      backend_of(device).fill_rows({.tokens = {.x = x, .row_sources = none, .top_k = 2},
                                    .row_offsets = offsets,
                                    .group_rows = group_rows,
                                    .rows = rows.view().slice(0, num_rows)});
    }
  }
  EXPECT_TRUE(same_bits(get(rows), poisoned({2, 8}, Dtype::f32)));
}

}  // namespace
}  // namespace switchyard::testing::fill_rows_contract_test
