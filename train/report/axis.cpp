// SPDX-License-Identifier: Apache-2.0
#include "report/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "report/numbers.h"

namespace switchyard::train {
namespace {

constexpr double kLargest = 1e100;  // differences of such values are still finite

// Returns 1, 2 or 5 times a power of ten, such that at most `most` steps of that size fit into
// `span`.
double round_distance(double span, int most) {
  const double least = span / most;
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    // The 0.1% slack absorbs rounding: exact decimals are not exact in binary.
    if (factor * power >= least * 0.999) return factor * power;
  }
  return 10.0 * power;
}

// Formats a tick label. All labels of an axis have the same number of decimals; `largest` is its
// largest absolute value.
std::string label_of(double value, double distance, double largest) {
  if (std::abs(value) < distance * 1e-6) return "0";
  if (distance < 1e-4 || largest >= 1e15) return fmt::format("{:.3g}", value);
  if (distance >= 999.0 && largest >= 1e4) {
    const auto power = static_cast<std::size_t>(std::log10(distance * 1.001) / 3.0);
    constexpr std::array kUnits{"", " k", " M", " G", " T"};
    return fmt::format("{:.0f}{}", value / std::pow(1000.0, power), kUnits[power]);
  }
  const int digits = std::max(0, static_cast<int>(-std::floor(std::log10(distance) + 1e-6)));
  return digits == 0 ? whole_text(value) : fmt::format("{:.{}f}", value, digits);
}

double size_of(Interval interval) {
  return std::max(std::abs(interval.low), std::abs(interval.high));
}

// Widens an interval that is empty or too narrow for doubles to resolve on an axis.
Interval with_room(Interval interval) {
  const double size = size_of(interval);
  if (interval.high - interval.low > size * 1e-6) return interval;
  const double room = size > 0.0 ? size * 0.1 : 1.0;
  return {interval.low - room, interval.high + room};
}

}  // namespace

Interval interval_of(std::span<const double> values) {
  Interval interval{kLargest, -kLargest};
  bool has_any = false;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    interval.low = std::min(interval.low, std::clamp(value, -kLargest, kLargest));
    interval.high = std::max(interval.high, std::clamp(value, -kLargest, kLargest));
    has_any = true;
  }
  return has_any ? interval : Interval{};
}

void Axis::add_ticks(double first, double last, double distance) {
  const auto count = std::lround(last - first);
  for (long i = 0; i <= count; ++i) {
    const double value = (first + static_cast<double>(i)) * distance;
    ticks_.push_back({value, label_of(value, distance, size_of(interval_))});
  }
}

Axis Axis::rounded(Interval interval, int most_ticks) {
  interval = with_room(interval);
  const double distance = round_distance(interval.high - interval.low, most_ticks);
  Axis axis;
  const double first = std::floor(interval.low / distance + 1e-6);
  const double last = std::ceil(interval.high / distance - 1e-6);
  axis.interval_ = {first * distance, last * distance};
  axis.add_ticks(first, last, distance);
  return axis;
}

Axis Axis::whole(Interval interval, int most_ticks) {
  Axis axis;
  if (interval.high <= interval.low) {
    axis.interval_ = {interval.low - 1.0, interval.low + 1.0};
    axis.ticks_.push_back({interval.low, whole_text(interval.low)});
    return axis;
  }
  axis.interval_ = interval;
  const double distance = std::max(1.0, round_distance(interval.high - interval.low, most_ticks));
  const double first = std::ceil(interval.low / distance);
  if (first * distance - interval.low > 0.4 * distance) {  // so that labels do not touch
    axis.ticks_.push_back({interval.low, whole_text(interval.low)});
  }
  axis.add_ticks(first, std::floor(interval.high / distance), distance);
  return axis;
}

Axis Axis::logarithmic(Interval interval, int most_ticks) {
  Axis axis;
  axis.is_logarithmic_ = true;
  const double first = std::floor(std::log10(interval.low) + 1e-6);
  double last = std::ceil(std::log10(interval.high) - 1e-6);
  const double stride = std::max(1.0, std::ceil((last - first) / most_ticks));
  last = first + std::max(1.0, std::ceil((last - first) / stride)) * stride;
  const auto count = std::lround((last - first) / stride);
  for (long i = 0; i <= count; ++i) {
    const double value = std::pow(10.0, first + static_cast<double>(i) * stride);
    axis.ticks_.push_back({value, label_of(value, value, value)});
  }
  axis.interval_ = {std::pow(10.0, first), std::pow(10.0, last)};
  return axis;
}

double Axis::place(double value) const {
  value = std::clamp(value, interval_.low, interval_.high);
  if (is_logarithmic_) {
    return std::log(value / interval_.low) / std::log(interval_.high / interval_.low);
  }
  return (value - interval_.low) / (interval_.high - interval_.low);
}

}  // namespace switchyard::train
