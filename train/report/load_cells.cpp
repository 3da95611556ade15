// SPDX-License-Identifier: Apache-2.0
#include "report/load_cells.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace switchyard::train {
namespace {

constexpr std::size_t kMostColumns = 200;
constexpr std::size_t kFewestColumns = 24;
constexpr std::size_t kMostRows = 64;        // per layer
constexpr std::size_t kMostCells = 150'000;  // over all layers; each takes a byte in the report
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Logarithmic, so that twice and half the even share are equally far from it.
double distance_from_even(double share) {
  return share > 0.0 ? std::abs(std::log(share)) : std::numeric_limits<double>::infinity();
}

std::vector<double> shares_of(std::span<const LoadRecord> records, std::size_t layer,
                              std::size_t num_experts) {
  std::vector<double> picks(num_experts, 0.0);
  double total = 0.0;
  for (const LoadRecord& record : records) {
    if (layer >= record.picks.size()) continue;
    const auto& counted = record.picks[layer];
    for (std::size_t e = 0; e < counted.size(); ++e) {
      picks[e] += static_cast<double>(counted[e]);
      total += static_cast<double>(counted[e]);
    }
  }
  for (double& pick : picks) {
    pick = total > 0.0 ? pick * static_cast<double>(num_experts) / total : kNone;
  }
  return picks;
}

double furthest_from_even(std::span<const double> shares) {
  return *std::max_element(shares.begin(), shares.end(), [](double a, double b) {
    return distance_from_even(a) < distance_from_even(b);
  });
}

std::span<const LoadRecord> of_column(std::span<const LoadRecord> records, std::size_t column,
                                      std::size_t num_columns) {
  const auto begin = column * records.size() / num_columns;
  return records.subspan(begin, (column + 1) * records.size() / num_columns - begin);
}

LoadCells cells_of(std::span<const LoadRecord> records, std::size_t layer, std::size_t num_experts,
                   std::size_t num_columns) {
  const auto experts_a_row = (num_experts + kMostRows - 1) / kMostRows;
  const auto num_rows = (num_experts + experts_a_row - 1) / experts_a_row;
  LoadCells cells{.num_experts = static_cast<int>(num_experts),
                  .experts_a_row = static_cast<int>(experts_a_row),
                  .num_rows = static_cast<int>(num_rows),
                  .shares = std::vector<double>(num_rows * num_columns)};
  for (std::size_t c = 0; c < num_columns; ++c) {
    const auto shares = shares_of(of_column(records, c, num_columns), layer, num_experts);
    for (std::size_t r = 0; r < num_rows; ++r) {
      const auto first = r * experts_a_row;
      const auto count = std::min(experts_a_row, num_experts - first);
      cells.shares[r * num_columns + c] =
          furthest_from_even(std::span(shares).subspan(first, count));
    }
    cells.last_greatest = *std::max_element(shares.begin(), shares.end());
  }
  return cells;
}

// Returns the number of experts of every layer: the most that any record counted.
std::vector<std::size_t> experts_of_layers(std::span<const LoadRecord> records) {
  std::vector<std::size_t> experts;
  for (const LoadRecord& record : records) {
    experts.resize(std::max(experts.size(), record.picks.size()));
    for (std::size_t l = 0; l < record.picks.size(); ++l) {
      experts[l] = std::max(experts[l], record.picks[l].size());
    }
  }
  return experts;
}

}  // namespace

LoadTable load_table(std::span<const LoadRecord> records) {
  const auto experts = experts_of_layers(records);
  std::size_t rows = 0;
  for (const auto count : experts) rows += std::min(count, kMostRows);
  LoadTable table;
  if (rows == 0) return table;
  const auto columns =
      std::min({records.size(), kMostColumns, std::max(kFewestColumns, kMostCells / rows)});
  for (std::size_t c = 0; c < columns; ++c) {
    table.last_steps.push_back(of_column(records, c, columns).back().step);
  }
  for (std::size_t l = 0; l < experts.size(); ++l) {
    if (experts[l] == 0) {
      table.layers.emplace_back();
    } else {
      table.layers.push_back(cells_of(records, l, experts[l], columns));
    }
  }
  return table;
}

double strongest_share(const LoadTable& table) {
  std::vector<double> distances;
  for (const LoadCells& cells : table.layers) {
    for (const double share : cells.shares) {
      if (!std::isnan(share)) distances.push_back(distance_from_even(share));
    }
  }
  constexpr double kStrongest = 4.0;
  if (distances.empty()) return kStrongest;
  const auto most = distances.begin() + static_cast<std::ptrdiff_t>(distances.size() * 98 / 100);
  std::nth_element(distances.begin(), most, distances.end());
  for (const double share : {1.25, 1.5, 2.0, 3.0}) {
    if (*most <= std::log(share)) return share;
  }
  return kStrongest;
}

}  // namespace switchyard::train
