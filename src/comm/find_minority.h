// SPDX-License-Identifier: Apache-2.0
// Decides which ranks to blame when ranks disagree.
#pragma once

#include <vector>

namespace switchyard {

// Returns the smaller part; of equally large parts, the one without the lowest rank. Both parts are
// in ascending order and not empty.
inline std::vector<int> find_minority(std::vector<int> some, std::vector<int> others) {
  const bool others_are_right =
      others.size() != some.size() ? others.size() > some.size() : others.front() < some.front();
  return others_are_right ? some : others;
}

}  // namespace switchyard
