// Where values lie along a side of a chart, and which of them are written there.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace switchyard::train {

struct Interval {
  double low = 0.0;
  double high = 1.0;
};

// Of what is finite; {0, 1} of nothing. What is beyond ±1e100 counts as that.
Interval interval_of(std::span<const double> values);

struct Tick {
  double value = 0.0;
  std::string label;
};

class Axis {
 public:
  // Ticks are at round values, at most `most_ticks` + 2 of them, and the first and last end the
  // axis.
  static Axis rounded(Interval interval, int most_ticks);
  // Ends where the interval does, with ticks at whole numbers within; for steps.
  static Axis whole(Interval interval, int most_ticks);
  // Powers of ten. The interval is of positive values.
  static Axis logarithmic(Interval interval, int most_ticks);

  // 0 at the low end, 1 at the high one; never beyond.
  double place(double value) const;
  const std::vector<Tick>& ticks() const { return ticks_; }
  Interval interval() const { return interval_; }

 private:
  // At the multiples of `distance` from `first` to `last`; the interval is known.
  void add_ticks(double first, double last, double distance);

  Interval interval_;
  bool is_logarithmic_ = false;
  std::vector<Tick> ticks_;
};

}  // namespace switchyard::train
