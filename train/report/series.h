// Values over steps, and fewer of them that draw the same.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "training/history.h"

namespace switchyard::train {

struct Point {
  double step = 0.0;
  double value = 0.0;  // not finite: a gap
};

using Series = std::vector<Point>;

Series series_of(std::span<const StepRecord> steps, double (*value)(const StepRecord&));

// At most `most` points, the least and the greatest of every stretch among them.
Series thinned(const Series& series, std::size_t most);

// Means of the finite values of up to `window` points around a point, at no more than `most`
// places; gaps, the first and the last point stay as they are.
Series smoothed(const Series& series, std::size_t window, std::size_t most);

}  // namespace switchyard::train
