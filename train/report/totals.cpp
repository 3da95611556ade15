// SPDX-License-Identifier: Apache-2.0
// The report's totals: rows and waits by rank, time by stage, bytes by kind.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "report/bars.h"
#include "report/numbers.h"
#include "report/sections.h"

namespace switchyard::train {
namespace {

constexpr std::size_t kMostRanksShown = 32;

double mean_over_steps(const RunSummary& run, double (*value)(const StepRecord&)) {
  double sum = 0.0;
  double count = 0.0;
  run.history.for_each_step_record([&](const StepRecord& record, double num_steps) {
    if (!std::isfinite(value(record))) return;
    sum += value(record) * num_steps;
    count += num_steps;
  });
  return count > 0.0 ? sum / count : std::nan("");
}

std::string products_html(const RunSummary& run) {
  if (run.history.steps.empty()) return "";
  const double share = mean_over_steps(run, [](const StepRecord& r) { return r.gemm_share; });
  auto text =
      fmt::format("<b>{}</b> of the ranks’ time is in matrix products.", percent_text(share));
  const double seconds = mean_over_steps(run, [](const StepRecord& r) { return r.moe_seconds; });
  const double gflops = mean_over_steps(run, [](const StepRecord& r) { return r.moe_gflops; });
  if (seconds > 0.0 && gflops > 0.0) {
    text += fmt::format(
        " MoE layers take {} a step, in which the experts’ products reach {} GFLOP/s over all "
        "ranks.",
        duration_text(seconds), short_text(gflops));
  }
  std::int64_t again = 0;
  for (const StepRecord& record : run.history.steps) again += record.ran_again;
  if (again > 0) {
    text += fmt::format(" {} {} ran again because bounded buffers overflowed.",
                        count_text(static_cast<double>(again)), again == 1 ? "step" : "steps");
  }
  return "<p class=\"note\">" + text + "</p>\n";
}

std::string since_html(const RunSummary& run) {
  if (run.measured_steps == run.history.num_steps()) return "";
  return fmt::format("<p class=\"note\">Over the {} steps since the run was resumed.</p>\n",
                     run.measured_steps);
}

}  // namespace

std::string stages_html(const RunSummary& run) {
  double total = 0.0;
  for (const StageTime& stage : run.stages) total += stage.seconds;
  const auto num_steps = static_cast<double>(run.measured_steps);
  BarTable table{.name_title = "Stage", .first_title = "a step", .second_title = "share"};
  for (const StageTime& stage : run.stages) {
    table.bars.push_back({.name = stage.name,
                          .amount = stage.seconds,
                          .first_text = duration_text(stage.seconds / num_steps),
                          .second_text = percent_text(stage.seconds / total)});
  }
  return (table.bars.empty() ? "" : bars_html(std::move(table))) + since_html(run) +
         products_html(run);
}

std::string ranks_html(const RunSummary& run) {
  if (run.ranks.empty() || run.measured_steps == 0) return "";
  const auto num_steps = static_cast<double>(run.measured_steps);
  BarTable table{
      .name_title = "Rank", .first_title = "rows a step", .second_title = "waited a step"};
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    const RankUse& use = run.ranks[r];
    const auto rows = static_cast<double>(use.rows);
    const auto waited = duration_text(use.waited_seconds / num_steps);
    table.bars.push_back({.name = fmt::format("rank {}", r),
                          .amount = rows,
                          .first_text = count_text(rows / num_steps),
                          .second_text = use.waited_seconds > 0.0
                                             ? fmt::format("{} for rank {}", waited, use.waited_for)
                                             : "–"});
  }
  auto text = std::string(
      "Rows are the tokens’ copies that a rank received for its experts. Waiting is the time "
      "that it waited in MoE layers for the rank that kept it longest.");
  if (table.bars.size() > kMostRanksShown) {
    text += fmt::format(" These are the {} ranks with the most rows, of {}.", kMostRanksShown,
                        table.bars.size());
    std::ranges::stable_sort(table.bars, std::ranges::greater(), &Bar::amount);
    table.bars.resize(kMostRanksShown);
  }
  return "<p class=\"note\">" + text + "</p>\n" + bars_html(std::move(table)) + since_html(run);
}

std::string bytes_html(const RunSummary& run) {
  if (run.bytes.empty()) return "";
  double total = 0.0;
  const auto num_steps = static_cast<double>(run.measured_steps);
  BarTable table{.name_title = "What", .first_title = "a step", .second_title = "in all"};
  for (const auto& [name, count] : run.bytes) {
    const auto bytes = static_cast<double>(count);
    total += bytes;
    table.bars.push_back({.name = name,
                          .amount = bytes,
                          .first_text = bytes_text(bytes / num_steps),
                          .second_text = bytes_text(bytes)});
  }
  return bars_html(std::move(table)) + since_html(run) +
         fmt::format("<p class=\"note\"><b>{}</b> between ranks in all, <b>{}</b> a step.</p>\n",
                     bytes_text(total), bytes_text(total / num_steps));
}

}  // namespace switchyard::train
