// SPDX-License-Identifier: Apache-2.0
#include "report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/numbers.h"
#include "report/text.h"

namespace switchyard::train {
namespace {

// The SVG is stretched to its box, so a unit is a thousandth of either side.
constexpr double kUnits = 1000.0;

std::string units(double place) {
  return fmt::format("{:.4g}", std::clamp(place, 0.0, 1.0) * kUnits);
}

std::string percent(double place) {
  return fmt::format("{:.2f}%", std::clamp(place, 0.0, 1.0) * 100.0);
}

double across_of(const Chart& chart, const Point& point) { return chart.across.place(point.step); }
double down_of(const Chart& chart, double value) { return 1.0 - chart.up.place(value); }

// Starts a new segment after every gap. A single point becomes a dot, since lines have round ends.
std::string path_of(const Chart& chart, const Series& points) {
  std::string path;
  bool pen_is_down = false;
  bool has_length = false;
  for (const Point& point : points) {
    if (!std::isfinite(point.value)) {
      if (pen_is_down && !has_length) path += "h0";
      pen_is_down = false;
      continue;
    }
    has_length = pen_is_down;
    path += fmt::format("{}{} {}", pen_is_down ? "L" : "M", units(across_of(chart, point)),
                        units(down_of(chart, point.value)));
    pen_is_down = true;
  }
  if (pen_is_down && !has_length) path += "h0";
  return path;
}

std::string dots_of(const Chart& chart, const Series& points) {
  std::string path;
  for (const Point& point : points) {
    if (!std::isfinite(point.value)) continue;
    path +=
        fmt::format("M{} {}h0", units(across_of(chart, point)), units(down_of(chart, point.value)));
  }
  return path;
}

std::string line_svg(const Chart& chart, const Line& line) {
  std::string steps;
  std::string values;
  for (const Point& point : line.points) {
    if (!std::isfinite(point.value)) continue;
    steps += fmt::format("{}{:.0f}", steps.empty() ? "" : " ", point.step);
    values += (values.empty() ? "" : " ") + plain_text(point.value);
  }
  std::string svg = fmt::format(
      "<path class=\"line {}\" data-name=\"{}\" data-x=\"{}\" data-y=\"{}\" d=\"{}\"/>",
      escaped(line.style), escaped(line.name), steps, values, path_of(chart, line.points));
  if (line.has_dots) {
    svg += fmt::format("<path class=\"dots {}\" d=\"{}\"/>", escaped(line.style),
                       dots_of(chart, line.points));
  }
  return svg;
}

std::string grid_svg(const Chart& chart) {
  std::string path;
  for (const Tick& tick : chart.up.ticks()) {
    path += fmt::format("M0 {}H1000", units(down_of(chart, tick.value)));
  }
  std::string svg = fmt::format("<path class=\"grid\" d=\"{}\"/>", path);
  for (const Level& level : chart.levels) {
    if (!std::isfinite(level.value)) continue;
    svg +=
        fmt::format("<path class=\"level\" d=\"M0 {}H1000\"/>", units(down_of(chart, level.value)));
  }
  return svg;
}

std::string labels_html(const Chart& chart) {
  std::string html;
  for (const Tick& tick : chart.up.ticks()) {
    html += fmt::format("<span class=\"y\" style=\"top:{}\">{}</span>",
                        percent(down_of(chart, tick.value)), tick.label);
  }
  for (const Tick& tick : chart.across.ticks()) {
    html += fmt::format("<span class=\"x\" style=\"left:{}\">{}</span>",
                        percent(chart.across.place(tick.value)), tick.label);
  }
  for (const Level& level : chart.levels) {
    if (!std::isfinite(level.value)) continue;
    html += fmt::format("<span class=\"level-label\" style=\"top:{}\">{}</span>",
                        percent(down_of(chart, level.value)), escaped(level.label));
  }
  return html;
}

std::string legend_html(const Chart& chart) {
  std::string html = "<p class=\"legend\">";
  for (const Line& line : chart.lines) {
    html +=
        fmt::format("<span><i class=\"{}\"></i>{}</span>", escaped(line.style), escaped(line.name));
  }
  return html + "</p>";
}

}  // namespace

std::string chart_html(const Chart& chart) {
  std::string lines;
  for (const Line& line : chart.lines) lines += line_svg(chart, line);
  const auto interval = chart.across.interval();
  return fmt::format(
      "{}<div class=\"chart{}\"><div class=\"plot\" data-from=\"{}\" data-to=\"{}\">"
      "<svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" role=\"img\" "
      "aria-label=\"{}\">{}{}</svg>{}</div></div>\n",
      chart.has_legend ? legend_html(chart) : "", chart.is_small ? " small" : "",
      plain_text(interval.low), plain_text(interval.high), escaped(chart.title), grid_svg(chart),
      lines, labels_html(chart));
}

Axis upward_axis(const std::vector<Line>& lines, const std::vector<Level>& levels, int most_ticks) {
  std::vector<double> values;
  for (const Line& line : lines) {
    for (const Point& point : line.points) {
      if (std::isfinite(point.value)) values.push_back(point.value);
    }
  }
  for (const Level& level : levels) {
    if (std::isfinite(level.value)) values.push_back(level.value);
  }
  const auto interval = interval_of(values);
  if (interval.low > 0.0 && !values.empty()) {
    constexpr double kSpike = 20.0;
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    if (interval.high > kSpike * *middle) return Axis::logarithmic(interval, most_ticks);
  }
  return Axis::rounded(interval, most_ticks);
}

}  // namespace switchyard::train
