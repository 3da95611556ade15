// SPDX-License-Identifier: Apache-2.0
// Fixture for tests of lay_out on every device.
#pragma once

#include <array>
#include <vector>

#include "support/device/device_tables.h"
#include "support/device/plain_layout.h"
#include "support/random.h"

namespace switchyard::testing {

// Mixes experts with few, many and no rows.
inline Ints random_counts(int num_ranks, int num_experts) {
  Random random(static_cast<std::uint64_t>(num_ranks * 10000 + num_experts));
  Ints counts;
  for (int i = 0; i < num_ranks * num_experts; ++i) {
    const auto most = std::array{1, 4, 40}[index(random.below(3))];
    counts.push_back(static_cast<std::int32_t>(random.below(most)));
  }
  return counts;
}

class DeviceLayout : public DeviceTables {
 protected:
  Laid lay_out(const LayoutInput& in, const TensorView* step = nullptr,
               const Words& met = no_problems()) const {
    const auto num_experts = std::ssize(in.owners);
    Ints by_rank;
    Ints offsets{0};
    for (int r = 0; r < in.num_ranks; ++r) {
      for (const auto e : in.experts_of(r)) by_rank.push_back(e);
      offsets.push_back(static_cast<std::int32_t>(by_rank.size()));
    }
    const auto num_local = std::ssize(in.experts_of(in.rank));
    const Tensor counts = put_rows(in, in.counts);
    const Tensor distinct_tokens = put_rows(in, in.distinct_tokens);
    const Tensor must_agree = put_rows(in, in.must_agree);
    const Tensor owners = put_all(in.owners);
    const Tensor experts_by_rank = put_all(by_rank);
    const Tensor rank_offsets = put_all(offsets);
    const Tensor problems = step != nullptr ? put_rows(in, met) : Tensor();
    Tensor expert_offsets = poisoned(num_experts, Dtype::i32);
    Tensor rows_before = poisoned(num_experts, Dtype::i32);
    Tensor kept_rows = poisoned(num_experts, Dtype::i32);
    Tensor row_offsets = poisoned(num_local + 1, Dtype::i32);
    Tensor group_rows = poisoned(num_local, Dtype::i32);
    Tensor source_offsets = poisoned(num_experts + 1, Dtype::i32);
    Tensor layout = poisoned(layout_words(in.num_ranks), Dtype::i64);
    Tensor token_offsets = poisoned(in.distinct_tokens.empty() ? 0 : in.num_ranks, Dtype::i32);
    LayOut args{.counts = rows_of(in, counts),
                .owners = owners,
                .experts_by_rank = experts_by_rank,
                .rank_offsets = rank_offsets,
                .rank = in.rank,
                .alignment = in.alignment,
                .sizing = in.sizing,
                .expert_offsets = expert_offsets,
                .rows_before = rows_before,
                .kept_rows = kept_rows,
                .row_offsets = row_offsets,
                .group_rows = group_rows,
                .source_offsets = source_offsets,
                .layout = layout};
    if (!in.distinct_tokens.empty()) {
      args.distinct_tokens = rows_of(in, distinct_tokens);
      args.token_offsets = token_offsets;
    }
    if (!in.must_agree.empty()) args.must_agree = rows_of(in, must_agree);
    if (step != nullptr) args.problems = rows_of(in, problems);
    if (step != nullptr) args.step = *step;
    backend_of(device).lay_out(args);
    return {values<std::int32_t>(get(expert_offsets)), values<std::int32_t>(get(rows_before)),
            values<std::int32_t>(get(kept_rows)),      values<std::int32_t>(get(row_offsets)),
            values<std::int32_t>(get(group_rows)),     values<std::int32_t>(get(source_offsets)),
            values<std::int64_t>(get(layout)),         values<std::int32_t>(get(token_offsets))};
  }

  // Puts one row per rank on the device, with poisoned columns after each.
  template <typename T>
  Tensor put_rows(const LayoutInput& in, const std::vector<T>& all) const {
    const auto columns = std::ssize(all) / in.num_ranks;
    return put_apart(Tensor::from<T>({in.num_ranks, columns}, all), in.columns_apart);
  }
  static ConstTensorView rows_of(const LayoutInput& in, const Tensor& wide) {
    return narrow(wide, {wide.rows(), wide.shape()[1] - in.columns_apart});
  }
};

}  // namespace switchyard::testing
