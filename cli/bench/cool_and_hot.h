// SPDX-License-Identifier: Apache-2.0
// How work on a GPU is timed.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

namespace switchyard::cli {

// Medians, measured the same way as in bench/gpu_timing.py. A GPU that was idle runs faster than a
// hot one, so a result is compared with a ceiling measured at the same heat.
struct CoolAndHot {
  double cool = 0.0;  // in five bursts of at most 20 ms or one round, each after a pause
  double hot = 0.0;   // after more than 0.3 s of the same work
};

inline CoolAndHot operator*(const CoolAndHot& v, double factor) {
  return {v.cool * factor, v.hot * factor};
}
// Returns `amount` per second if v is in seconds, or seconds if v is a rate.
inline CoolAndHot operator/(double amount, const CoolAndHot& v) {
  return {amount / v.cool, amount / v.hot};
}

// Returns the seconds that one call of `work` takes. `work` only enqueues onto a stream.
using Timer = std::function<CoolAndHot(const std::function<void()>& work)>;

// A GPU under load for more than about 30 ms reaches its power limit and slows down, so bursts end
// before that, unless one round takes longer.
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
