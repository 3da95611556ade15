// SPDX-License-Identifier: Apache-2.0
// Selects axes of a mesh by lists of names, some of which the mesh may not have.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "switchyard/mesh.h"

namespace switchyard {

// Returns the axes of the mesh whose names satisfy the predicate, in mesh order.
template <typename Predicate>
std::vector<std::string> axes_where(const Mesh& mesh, Predicate predicate) {
  std::vector<std::string> result;
  for (const MeshAxis& axis : mesh.axes()) {
    if (predicate(axis.name)) result.push_back(axis.name);
  }
  return result;
}

inline bool is_among(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

inline int num_ranks_along(const Mesh& mesh, const std::vector<std::string>& axes) {
  int ranks = 1;
  for (const auto& axis : axes) ranks *= mesh.size(axis);
  return ranks;
}

}  // namespace switchyard
