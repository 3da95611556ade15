// SPDX-License-Identifier: Apache-2.0
// Reduces pick counts to the cells of a picture: few enough to see, with the imbalance preserved.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "training/history.h"

namespace switchyard::train {

// One layer. Shares are relative to an even load: 1 is even, NaN means that nothing was picked.
struct LoadCells {
  int num_experts = 0;
  int experts_a_row = 1;  // a row shows the one furthest from even
  int num_rows = 0;
  std::vector<double> shares;  // [rows][columns]
  double last_greatest = 0.0;  // share of the fullest expert in the last column; NaN: no picks
};

struct LoadTable {
  std::vector<std::int64_t> last_steps;  // [columns]
  std::vector<LoadCells> layers;
};

LoadTable load_table(std::span<const LoadRecord> records);

// Returns the share at which colours saturate (below even: its reciprocal). Few cells exceed it.
double strongest_share(const LoadTable& table);

}  // namespace switchyard::train
