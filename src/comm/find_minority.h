// Whom to blame where ranks disagree.
#pragma once

#include <vector>

namespace switchyard {

// The smaller part; of equally large ones, that without the lowest rank. Ranks ascend, and neither
// part is empty.
inline std::vector<int> find_minority(std::vector<int> some, std::vector<int> others) {
  const bool others_are_right =
      others.size() != some.size() ? others.size() > some.size() : others.front() < some.front();
  return others_are_right ? some : others;
}

}  // namespace switchyard
