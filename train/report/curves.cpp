// SPDX-License-Identifier: Apache-2.0
// The report's charts over steps.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/chart.h"
#include "report/numbers.h"
#include "report/sections.h"

namespace switchyard::train {
namespace {

constexpr std::size_t kMostPoints = 1000;
constexpr std::size_t kMostSmallPoints = 400;
constexpr int kTicks = 6;
constexpr int kSmallTicks = 4;

Interval steps_of(const History& history) {
  std::vector<double> steps;
  for (const StepRecord& record : history.steps) steps.push_back(static_cast<double>(record.step));
  for (const HeldOutRecord& record : history.held_out) {
    steps.push_back(static_cast<double>(record.step));
  }
  return interval_of(steps);
}

// Reports how often the loss was not finite, and where first.
std::string gaps_html(const History& history) {
  const auto is_gap = [](const StepRecord& record) { return !std::isfinite(record.loss); };
  const auto& steps = history.steps;
  double count = 0.0;
  history.for_each_step_record([&](const StepRecord& record, double num_steps) {
    if (is_gap(record)) count += num_steps;
  });
  if (count == 0.0) return "";
  const auto first = std::find_if(steps.begin(), steps.end(), is_gap);
  return fmt::format(
      "<p class=\"note\"><b class=\"bad\">The training loss was not finite in {} {}</b>, first at "
      "step {}.</p>\n",
      whole_text(count), count == 1.0 ? "step" : "steps",
      whole_text(static_cast<double>(first->step)));
}

std::vector<Line> loss_lines(const History& history) {
  std::vector<Line> lines;
  const auto training = series_of(history.steps, [](const StepRecord& r) { return r.loss; });
  const auto window = training.size() / 25 | 1U;
  const bool is_merged = std::ssize(training) < history.num_steps();  // a point is several steps
  if (!training.empty()) {
    lines.push_back({.name = "training",
                     .style = "raw",
                     .points = thinned(training, kMostPoints),
                     .has_dots = training.size() == 1});
  }
  if (window > 1) {
    lines.push_back({.name = is_merged ? "training, smoothed"
                                       : fmt::format("training, mean of {} steps",
                                                     whole_text(static_cast<double>(window))),
                     .style = "mean",
                     .points = smoothed(training, window, kMostPoints / 2)});
  }
  Series held_out;
  for (const HeldOutRecord& record : history.held_out) {
    held_out.push_back({static_cast<double>(record.step), record.loss});
  }
  if (!held_out.empty()) {
    constexpr std::size_t kMostDots = 200;
    lines.push_back({.name = "held-out",
                     .style = "held",
                     .points = thinned(held_out, kMostDots),
                     .has_dots = true});
  }
  return lines;
}

struct SmallChart {
  const char* title;
  double (*value)(const StepRecord&);
  bool from_zero;
};

std::string small_chart_html(const History& history, const SmallChart& small) {
  const auto series = series_of(history.steps, small.value);
  std::vector<Line> lines{{.name = small.title,
                           .style = "mean",
                           .points = thinned(series, kMostSmallPoints),
                           .has_dots = series.size() == 1}};
  auto up = upward_axis(lines, {}, kSmallTicks);
  if (small.from_zero) {
    std::vector<double> values{0.0};
    for (const Point& point : series) values.push_back(point.value);
    up = Axis::rounded(interval_of(values), kSmallTicks);
  }
  return fmt::format("<div><h3>{}</h3>{}</div>\n", small.title,
                     chart_html({.title = small.title,
                                 .lines = std::move(lines),
                                 .across = Axis::whole(steps_of(history), kSmallTicks),
                                 .up = std::move(up),
                                 .has_legend = false,
                                 .is_small = true}));
}

}  // namespace

std::string loss_html(const RunSummary& run) {
  const History& history = run.history;
  auto lines = loss_lines(history);
  if (lines.empty()) return "";
  std::vector<Level> levels;
  if (std::isfinite(run.bigram_loss) && run.bigram_loss > 0.0) {
    levels.push_back({"bigram " + loss_text(run.bigram_loss), run.bigram_loss});
  }
  auto up = upward_axis(lines, levels, kTicks);
  return "<p class=\"note\">Cross-entropy over steps, nats per byte.</p>\n" +
         chart_html({.title = "Loss over steps: training and held-out, beside a bigram model’s",
                     .lines = std::move(lines),
                     .levels = std::move(levels),
                     .across = Axis::whole(steps_of(history), kTicks),
                     .up = std::move(up)}) +
         gaps_html(history);
}

std::string progress_html(const RunSummary& run) {
  if (run.history.steps.empty()) return "";
  std::string html = "<div class=\"trio\">";
  for (const SmallChart& small : {
           SmallChart{"Learning rate",
                      [](const StepRecord& r) { return static_cast<double>(r.learning_rate); },
                      true},
           SmallChart{"Gradient norm", [](const StepRecord& r) { return r.gradient_norm; }, false},
           SmallChart{"Tokens a second", [](const StepRecord& r) { return r.tokens_per_second; },
                      true},
       }) {
    html += small_chart_html(run.history, small);
  }
  return html + "</div>\n";
}

}  // namespace switchyard::train
