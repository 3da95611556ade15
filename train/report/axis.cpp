#include "report/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "report/numbers.h"

namespace switchyard::train {
namespace {

constexpr double kLargest = 1e100;  // differences of such are finite still

// 1, 2 or 5 times a power of ten, so that at most `most` of them fit.
double round_distance(double span, int most) {
  const double least = span / most;
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    // A thousandth: what is exact in decimals is not in binary.
    if (factor * power >= least * 0.999) return factor * power;
  }
  return 10.0 * power;
}

// All labels of an axis have the same digits; `largest` is the size of its largest value.
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

double size_of(Range range) { return std::max(std::abs(range.low), std::abs(range.high)); }

// One value alone, or values that double cannot tell apart on an axis, get room around them.
Range with_room(Range range) {
  const double size = size_of(range);
  if (range.high - range.low > size * 1e-6) return range;
  const double room = size > 0.0 ? size * 0.1 : 1.0;
  return {range.low - room, range.high + room};
}

}  // namespace

Range range_of(std::span<const double> values) {
  Range range{kLargest, -kLargest};
  bool has_any = false;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    range.low = std::min(range.low, std::clamp(value, -kLargest, kLargest));
    range.high = std::max(range.high, std::clamp(value, -kLargest, kLargest));
    has_any = true;
  }
  return has_any ? range : Range{};
}

void Axis::add_ticks(double first, double last, double distance) {
  const auto count = std::lround(last - first);
  for (long i = 0; i <= count; ++i) {
    const double value = (first + static_cast<double>(i)) * distance;
    ticks_.push_back({value, label_of(value, distance, size_of(range_))});
  }
}

Axis Axis::rounded(Range range, int most_ticks) {
  range = with_room(range);
  const double distance = round_distance(range.high - range.low, most_ticks);
  Axis axis;
  const double first = std::floor(range.low / distance + 1e-6);
  const double last = std::ceil(range.high / distance - 1e-6);
  axis.range_ = {first * distance, last * distance};
  axis.add_ticks(first, last, distance);
  return axis;
}

Axis Axis::whole(Range range, int most_ticks) {
  Axis axis;
  if (range.high <= range.low) {
    axis.range_ = {range.low - 1.0, range.low + 1.0};
    axis.ticks_.push_back({range.low, whole_text(range.low)});
    return axis;
  }
  axis.range_ = range;
  const double distance = std::max(1.0, round_distance(range.high - range.low, most_ticks));
  const double first = std::ceil(range.low / distance);
  if (first * distance - range.low > 0.4 * distance) {  // so that the labels do not touch
    axis.ticks_.push_back({range.low, whole_text(range.low)});
  }
  axis.add_ticks(first, std::floor(range.high / distance), distance);
  return axis;
}

Axis Axis::logarithmic(Range range, int most_ticks) {
  Axis axis;
  axis.is_logarithmic_ = true;
  const double first = std::floor(std::log10(range.low) + 1e-6);
  double last = std::ceil(std::log10(range.high) - 1e-6);
  const double stride = std::max(1.0, std::ceil((last - first) / most_ticks));
  last = first + std::max(1.0, std::ceil((last - first) / stride)) * stride;
  const auto count = std::lround((last - first) / stride);
  for (long i = 0; i <= count; ++i) {
    const double value = std::pow(10.0, first + static_cast<double>(i) * stride);
    axis.ticks_.push_back({value, label_of(value, value, value)});
  }
  axis.range_ = {std::pow(10.0, first), std::pow(10.0, last)};
  return axis;
}

double Axis::place(double value) const {
  value = std::clamp(value, range_.low, range_.high);
  if (is_logarithmic_) {
    return std::log(value / range_.low) / std::log(range_.high / range_.low);
  }
  return (value - range_.low) / (range_.high - range_.low);
}

}  // namespace switchyard::train
