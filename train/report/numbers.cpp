// SPDX-License-Identifier: Apache-2.0
#include "report/numbers.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <ctime>
#include <string_view>

namespace switchyard::train {
namespace {

constexpr const char* kDash = "–";
constexpr double kThousand = 1000.0;

// Prints three significant digits, without an exponent if possible.
std::string three_digits(double value) {
  const double size = std::abs(value);
  if (size >= 999.5 && size < 1e6) return fmt::format("{:.0f}", value);
  return fmt::format("{:.3g}", value);
}

template <std::size_t N>
std::string with_unit(double value, const std::array<const char*, N>& units) {
  std::size_t unit = 0;
  while (std::abs(value) >= 999.5 && unit + 1 < N) {
    value /= kThousand;
    ++unit;
  }
  const std::string_view name = units[unit];
  return three_digits(value) + (name.empty() ? "" : " ") + std::string(name);
}

}  // namespace

std::string loss_text(double loss) {
  if (!std::isfinite(loss)) return kDash;
  return std::abs(loss) < kThousand ? fmt::format("{:.3f}", loss) : short_text(loss);
}

std::string ratio_text(double ratio) {
  if (!std::isfinite(ratio)) return kDash;
  return std::abs(ratio) < kThousand ? fmt::format("{:.2f}", ratio) : short_text(ratio);
}

std::string whole_text(double value) {
  if (!std::isfinite(value) || std::abs(value) >= 1e15) return short_text(value);
  auto text = std::to_string(std::llround(std::abs(value)));
  for (auto at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return std::round(value) < 0.0 ? "-" + text : text;
}

std::string count_text(double count) {
  if (!std::isfinite(count)) return kDash;
  if (count >= 999.5 && count < 9999.5) return whole_text(count);
  return with_unit(count, std::array{"", "k", "M", "G", "T", "P"});
}

std::string bytes_text(double bytes) {
  if (!std::isfinite(bytes)) return kDash;
  return with_unit(bytes, std::array{"B", "kB", "MB", "GB", "TB", "PB"});
}

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds)) return kDash;
  if (seconds < 0.0 || seconds > 1e12) return three_digits(seconds) + " s";
  if (seconds < 0.9995) return three_digits(seconds * kThousand) + " ms";
  if (seconds < 59.5) return three_digits(seconds) + " s";
  const auto whole = std::llround(seconds);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

std::string time_text(std::int64_t seconds) {
  const std::time_t time = seconds;
  std::tm parts{};
  if (seconds == 0 || ::gmtime_r(&time, &parts) == nullptr) return kDash;
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02} UTC", 1900 + std::int64_t{parts.tm_year},
                     1 + parts.tm_mon, parts.tm_mday, parts.tm_hour, parts.tm_min);
}

std::string short_text(double value) { return std::isfinite(value) ? three_digits(value) : kDash; }

std::string percent_text(double share) {
  return std::isfinite(share) ? fmt::format("{:.1f} %", share * 100.0) : kDash;
}

std::string plain_text(double value) {
  return std::isfinite(value) ? fmt::format("{:.5g}", value) : "0";
}

}  // namespace switchyard::train
