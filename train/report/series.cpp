// SPDX-License-Identifier: Apache-2.0
#include "report/series.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace switchyard::train {
namespace {

// Appends the minimum and maximum of a stretch in step order, or a gap if no value is finite.
void append_extremes(Series& thin, std::span<const Point> stretch) {
  const Point* least = nullptr;
  const Point* greatest = nullptr;
  for (const Point& point : stretch) {
    if (!std::isfinite(point.value)) continue;
    if (least == nullptr || point.value < least->value) least = &point;
    if (greatest == nullptr || point.value > greatest->value) greatest = &point;
  }
  if (least == nullptr) {
    thin.push_back(stretch.front());
    return;
  }
  thin.push_back(*std::min(least, greatest));
  if (least != greatest) thin.push_back(*std::max(least, greatest));
}

double mean_of(std::span<const Point> points) {
  double sum = 0.0;
  double count = 0.0;
  for (const Point& point : points) {
    if (!std::isfinite(point.value)) continue;
    count += 1.0;
    sum += (point.value - sum) / count;  // running mean: a sum of huge values would overflow
  }
  return count > 0.0 ? sum : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

Series series_of(std::span<const StepRecord> steps, double (*value)(const StepRecord&)) {
  Series series;
  series.reserve(steps.size());
  for (const StepRecord& record : steps) {
    series.push_back({static_cast<double>(record.step), value(record)});
  }
  return series;
}

Series thinned(const Series& series, std::size_t most) {
  if (series.size() <= most) return series;
  const std::size_t stretches = std::max<std::size_t>(1, most / 2);
  Series thin;
  for (std::size_t i = 0; i < stretches; ++i) {
    const auto begin = i * series.size() / stretches;
    const auto end = (i + 1) * series.size() / stretches;
    append_extremes(thin, std::span(series).subspan(begin, end - begin));
  }
  return thin;
}

Series smoothed(const Series& series, std::size_t window, std::size_t most) {
  Series smooth;
  const std::size_t places = std::min(series.size(), most);
  for (std::size_t i = 0; i < places; ++i) {
    const auto at = places == 1 ? 0 : i * (series.size() - 1) / (places - 1);
    const auto reach = std::min({window / 2, at, series.size() - 1 - at});
    const auto around = std::span(series).subspan(at - reach, 2 * reach + 1);
    const bool is_gap = !std::isfinite(series[at].value);
    smooth.push_back({series[at].step, is_gap ? series[at].value : mean_of(around)});
  }
  return smooth;
}

}  // namespace switchyard::train
