// How work on a GPU is timed.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

namespace switchyard::cli {

// Medians, taken as bench/gpu_timing.py takes them. A GPU that was idle runs faster than one that
// is hot: a figure is compared with a ceiling of the same heat.
struct CoolAndHot {
  double cool = 0.0;  // in five bursts of at most 20 ms or one round, each after a pause
  double hot = 0.0;   // after a third of a second of the same work
};

inline CoolAndHot operator*(const CoolAndHot& v, double factor) {
  return {v.cool * factor, v.hot * factor};
}
// `amount` a second, where v are seconds; or the seconds, where it is a rate.
inline CoolAndHot operator/(double amount, const CoolAndHot& v) {
  return {amount / v.cool, amount / v.hot};
}

// Seconds of one call of a work, which only fills a stream.
using Timer = std::function<CoolAndHot(const std::function<void()>& work)>;

// A GPU under load for more than some 30 ms draws all the power that it may, and slows down: so
// bursts end before that, unless one round takes longer.
struct Heat {
  static constexpr int kBursts = 5;
  static constexpr std::chrono::milliseconds kPause{150};
  static constexpr double kWarmUp = 3e-3;  // seconds
  static constexpr double kBurst = 20e-3;
  static constexpr double kLoad = 1.3 * 0.3;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace switchyard::cli
