// SPDX-License-Identifier: Apache-2.0
// Named amounts as horizontal bars with two columns of text.
#pragma once

#include <string>
#include <vector>

namespace switchyard::train {

struct Bar {
  std::string name;
  double amount = 0.0;     // the longest fills the width
  std::string first_text;  // shown beside the bar
  std::string second_text;
};

struct BarTable {
  std::string name_title;
  std::string first_title;
  std::string second_title;
  std::vector<Bar> bars = {};
};

// Draws the bars, longest first.
std::string bars_html(BarTable table);

}  // namespace switchyard::train
