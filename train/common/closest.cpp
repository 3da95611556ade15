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

std::string hint_at_closest(std::string_view name, const std::vector<std::string>& names) {
  const auto distance_to = [&](const std::string& other) { return distance(other, name); };
  const auto closest = std::ranges::min_element(names, {}, distance_to);
  const auto letters =
      static_cast<std::size_t>(std::ranges::count_if(name, [](char c) { return c != '-'; }));
  if (closest == names.end() || 2 * distance_to(*closest) >= letters) return {};
  return "; the closest is \"" + *closest + '"';
}

}  // namespace switchyard::train
