// SPDX-License-Identifier: Apache-2.0
// A line chart over steps: HTML with an SVG that stretches while its text does not.
#pragma once

#include <string>
#include <vector>

#include "report/axis.h"
#include "report/series.h"

namespace switchyard::train {

struct Line {
  std::string name;       // in the legend and the tooltip
  std::string style;      // CSS class that sets its colour
  Series points;          // thinned enough to draw
  bool has_dots = false;  // marks its points
};

// A horizontal line to compare with.
struct Level {
  std::string label;
  double value = 0.0;
};

struct Chart {
  std::string title;  // description for screen readers
  std::vector<Line> lines;
  std::vector<Level> levels = {};
  Axis across;
  Axis up;
  bool has_legend = true;
  bool is_small = false;
};

std::string chart_html(const Chart& chart);

// Returns an axis for all values of the lines and levels. It is logarithmic if a few spikes would
// hide the rest.
Axis upward_axis(const std::vector<Line>& lines, const std::vector<Level>& levels, int most_ticks);

}  // namespace switchyard::train
