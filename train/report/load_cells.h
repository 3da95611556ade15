// Picks of experts as cells of a picture: few enough to be seen, with what is uneven kept.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "training/history.h"

namespace switchyard::train {

// One layer. Shares are relative to an even one: 1 is even, NaN says that nothing was picked.
struct LoadCells {
  int num_experts = 0;
  int experts_a_row = 1;  // a row shows the one of them that is furthest from even
  int num_rows = 0;
  std::vector<double> shares;  // [rows][columns]
  double last_greatest = 0.0;  // share of the fullest expert in the last column; NaN: none
};

struct LoadTable {
  std::vector<std::int64_t> last_steps;  // [columns]
  std::vector<LoadCells> layers;
};

LoadTable load_table(std::span<const LoadRecord> records);

// The share at which colours are strongest, and below even its reciprocal; what few cells exceed.
double strongest_share(const LoadTable& table);

}  // namespace switchyard::train
