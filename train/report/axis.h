// SPDX-License-Identifier: Apache-2.0
// Maps values to positions along a side of a chart, and chooses its tick labels.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace switchyard::train {

struct Interval {
  double low = 0.0;
  double high = 1.0;
};

// Returns the range of the finite values, or {0, 1} if there are none. Values beyond ±1e100 are
// clamped.
Interval interval_of(std::span<const double> values);

struct Tick {
  double value = 0.0;
  std::string label;
};

class Axis {
 public:
  // Places at most `most_ticks` + 2 ticks at round values. The first and last are the ends of the
  // axis.
  static Axis rounded(Interval interval, int most_ticks);
  // Ends where the interval ends, with ticks at whole numbers inside it. Used for steps.
  static Axis whole(Interval interval, int most_ticks);
  // Places ticks at powers of ten. The interval must be positive.
  static Axis logarithmic(Interval interval, int most_ticks);

  // Returns 0 at the low end, 1 at the high end, and never less or more.
  double place(double value) const;
  const std::vector<Tick>& ticks() const { return ticks_; }
  Interval interval() const { return interval_; }

 private:
  // Adds ticks at `distance` times every integer from `first` to `last`. `interval_` must be set.
  void add_ticks(double first, double last, double distance);

  Interval interval_;
  bool is_logarithmic_ = false;
  std::vector<Tick> ticks_;
};

}  // namespace switchyard::train
