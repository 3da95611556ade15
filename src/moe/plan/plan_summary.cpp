// SPDX-License-Identifier: Apache-2.0
// Turns the reports of devices and ranks into a plan's summary, status and errors.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/require.h"
#include "moe/plan/plan_data.h"

namespace switchyard {

PlanRecords record_of(const PlanReport& report) {
  const auto counts = report.counts.span<std::int32_t>();
  const auto distinct = report.distinct_tokens.span<std::int32_t>();
  PlanRecords record{.headers = {RecordHeader{}},
                     .counts = {counts.begin(), counts.end()},
                     .distinct_tokens = {distinct.begin(), distinct.end()}};
  add_problems(record.headers[0], report.problems);
  return record;
}

PlanRecords records_of(const PeerReports& reports) {
  PlanRecords records;
  for (std::int64_t r = 0; r < reports.headers.rows(); ++r) {
    RecordHeader& header = records.headers.emplace_back();
    std::memcpy(&header, reports.headers.row(r), sizeof(header));
    add_problems(header, reports.problems.slice(r, r + 1));
    const auto append = [r](const TensorView& from, std::vector<std::int32_t>& to) {
      const auto row = from.slice(r, r + 1).span<std::int32_t>();
      to.insert(to.end(), row.begin(), row.end());
    };
    append(reports.counts, records.counts);
    append(reports.distinct_tokens, records.distinct_tokens);
  }
  return records;
}

void PlanSummary::fill(const PlanRecords& records, const ConstTensorView& layout,
                       const Sizing& sizing, int rank) {
  const auto num_ranks = static_cast<std::int64_t>(records.headers.size());
  const auto num_experts = records.counts.size() / records.headers.size();
  counts.assign(records.counts.begin(), records.counts.end());
  distinct_tokens.assign(records.distinct_tokens.begin(), records.distinct_tokens.end());
  status.bad_ids_message = describe_bad_ids(records, static_cast<int>(num_experts));
  status.bad_ids = !status.bad_ids_message.empty();
  status.non_finite_message = describe_non_finite(records);
  status.non_finite = !status.non_finite_message.empty();
  status.available_rows = sizing.capacity();

  const auto words = layout.span<std::int64_t>();
  const auto words_from = [&](std::int64_t first) {
    return words.subspan(static_cast<std::size_t>(first), records.headers.size());
  };
  status.overflow = words[kOverflowWord] != 0;
  const auto needed = words_from(needed_rows_word(num_ranks, 0));
  const auto dropped = words_from(dropped_word(num_ranks, 0));
  status.needed_rows.assign(needed.begin(), needed.end());
  status.dropped.assign(dropped.begin(), dropped.end());
  const auto tokens = words_from(needed_tokens_word(num_ranks, 0));
  status.needed_tokens.assign(tokens.begin(), tokens.end());
  num_tokens = tokens[static_cast<std::size_t>(rank)];
  const bool crosses_once = std::ranges::any_of(tokens, [](auto count) { return count > 0; });
  status.available_tokens = crosses_once ? sizing.token_capacity() : 0;
  num_rows = words[static_cast<std::size_t>(used_rows_word(num_ranks, rank))];
  const auto own =
      std::span(counts).subspan(static_cast<std::size_t>(rank) * num_experts, num_experts);
  num_sources = std::accumulate(own.begin(), own.end(), std::int64_t{0});
}

void require_sound_routing(const PlanStatus& status) {
  require(!status.non_finite, "{}", status.non_finite_message);
  require(!status.bad_ids, "{}", status.bad_ids_message);
}

void require_nameable_rows(const PlanSummary& summary, const ExpertPlacement& placement,
                           const Sizing& sizing) {
  constexpr auto kMaxRows = std::int64_t{std::numeric_limits<std::int32_t>::max()};
  const auto num_experts = static_cast<std::size_t>(placement.num_experts());
  for (int r = 0; r < placement.num_ranks(); ++r) {
    // A bounded plan moves only the rows that fit, but its slots count all rows that were asked
    // for.
    std::int64_t most = summary.status.needed_rows[static_cast<std::size_t>(r)];
    if (sizing.is_bounded()) {
      most = 0;
      for (const auto e : placement.experts_of(r)) {
        for (auto i = static_cast<std::size_t>(e); i < summary.counts.size(); i += num_experts) {
          most += summary.counts[i];
        }
      }
    }
    require(most <= kMaxRows, "rank {} would receive {} rows; at most {} are supported on one rank",
            r, most, std::int64_t{kMaxRows});
  }
}

void check_status(const PlanStatus& status, const Sizing& sizing) {
  require_sound_routing(status);
  if (!status.overflow || sizing.overflow() == Overflow::drop) return;
  const auto most = std::ranges::max_element(status.needed_rows);
  require(*most <= status.available_rows,
          "overflow: rank {} needs {} rows, but the capacity is {} on every rank; give the plan a "
          "capacity of at least {}, or exact sizing",
          most - status.needed_rows.begin(), *most, status.available_rows, *most);
  const auto tokens = std::ranges::max_element(status.needed_tokens);
  throw InvalidArgument(fmt::format(
      "overflow: rank {} receives {} tokens, but has room for {}; give the plan a token capacity "
      "of at least {}, or exact sizing",
      tokens - status.needed_tokens.begin(), *tokens, status.available_tokens, *tokens));
}

}  // namespace switchyard
