// A chart of lines over steps, as HTML with an SVG inside that stretches while its text does not.
#pragma once

#include <string>
#include <vector>

#include "report/axis.h"
#include "report/series.h"

namespace switchyard::train {

struct Line {
  std::string name;       // in the legend and where the pointer is
  std::string style;      // class that the style sheet has a colour for
  Series points;          // few enough to be drawn
  bool has_dots = false;  // at its points
};

// A level that lines are compared with.
struct Level {
  std::string label;
  double value = 0.0;
};

struct Chart {
  std::string title;  // what it shows, for those who cannot see it
  std::vector<Line> lines;
  std::vector<Level> levels = {};
  Axis across;
  Axis up;
  bool has_legend = true;
  bool is_small = false;
};

std::string chart_html(const Chart& chart);

// For every value of the lines and levels; logarithmic where a few spikes would hide the rest.
Axis upward_axis(const std::vector<Line>& lines, const std::vector<Level>& levels, int most_ticks);

}  // namespace switchyard::train
