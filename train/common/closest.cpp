// SPDX-License-Identifier: Apache-2.0
#include "common/closest.h"

#include <algorithm>
#include <numeric>

namespace switchyard::train {
namespace {

// Returns the edit distance: the number of letters to change, add or remove.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const auto changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string closest_to(std::string_view name, const std::vector<std::string>& names) {
  return *std::ranges::min_element(names, {},
                                   [&](const std::string& other) { return distance(other, name); });
}

}  // namespace switchyard::train
