// SPDX-License-Identifier: Apache-2.0
// Values over steps, and thinned versions of them that look the same when drawn.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "training/history.h"

namespace switchyard::train {

struct Point {
  double step = 0.0;
  double value = 0.0;  // a gap if not finite
};

using Series = std::vector<Point>;

Series series_of(std::span<const StepRecord> steps, double (*value)(const StepRecord&));

// Returns at most `most` points, including the minimum and maximum of every stretch.
Series thinned(const Series& series, std::size_t most);

// Returns centred moving averages of the finite values, each over up to `window` points, at no more
// than `most` places. Gaps and the first and last points stay as they are.
Series smoothed(const Series& series, std::size_t window, std::size_t most);

}  // namespace switchyard::train
