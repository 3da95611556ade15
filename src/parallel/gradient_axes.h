// SPDX-License-Identifier: Apache-2.0
// The roles of mesh axes in reduce_gradients, and the roles that the ranks have agreed on.
#pragma once

#include <compare>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/mesh.h"
#include "switchyard/parallelize.h"

namespace switchyard {

enum class AxisRole { copies, experts, layers, repeats, unnamed, named_twice };

struct AxisUse {
  std::string name;
  AxisRole role = AxisRole::copies;

  friend auto operator<=>(const AxisUse&, const AxisUse&) = default;
};
using AxisUses = std::vector<AxisUse>;  // one for every axis of a mesh

AxisUses uses_of(const Mesh& mesh, const GradientAxes& axes);
// Returns an objection that names an axis with no clear role and says how to fix it; empty if there
// is none.
std::string objection_to_axes(const AxisUses& uses);
// Returns texts such as "ep for experts".
std::vector<std::string> texts_of(const AxisUses& uses);
// Returns the axes along which ranks hold the same layers.
std::vector<std::string> axes_of_same_layers(const AxisUses& uses);
// Return the axes to sum over: for the gradients of replicated tensors, and for those of experts.
std::vector<std::string> axes_to_add(const AxisUses& uses);
std::vector<std::string> axes_to_add_experts(const AxisUses& uses);

// The uses that ranks have agreed on, kept by the mesh. A call is first compared over the group of
// the previous call, even if its uses differ, so that no rank waits in a group that the others do
// not join. Uses that are new are then compared over the world.
struct AgreedAxes {
  static AgreedAxes& of(Mesh& mesh);
  // Collective over the world if the uses are new: compares them and makes their groups. Stores
  // them as the last.
  void agree(std::string_view operation, Mesh& mesh, const AxisUses& uses);

  AxisUses last;             // empty before the first call
  std::set<AxisUses> known;  // uses known to be equal on every rank
};

}  // namespace switchyard
