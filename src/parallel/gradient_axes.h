// What the axes of a mesh mean to reduce_gradients, and what it knows of the ranks' opinions.
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
using AxisUses = std::vector<AxisUse>;  // of every axis of a mesh

AxisUses uses_of(const Mesh& mesh, const GradientAxes& axes);
// Names an axis whose role nobody can know, and what to do about it; empty: there is none.
std::string objection_to_axes(const AxisUses& uses);
// "ep for experts"
std::vector<std::string> texts_of(const AxisUses& uses);
// The ranks along these hold the same layers.
std::vector<std::string> axes_of_same_layers(const AxisUses& uses);
// The gradients of what is replicated, and of experts, are added over these.
std::vector<std::string> axes_to_add(const AxisUses& uses);
std::vector<std::string> axes_to_add_experts(const AxisUses& uses);

// Kept by a mesh. The world compares uses when they are new. Otherwise the ranks that meet are
// those of the last call, whatever they give now, so that none waits where the others do not come.
struct AgreedAxes {
  static AgreedAxes& of(Mesh& mesh);
  // Collective over the world if the uses are new. Makes them the last, and their groups.
  void agree(std::string_view operation, Mesh& mesh, const AxisUses& uses);

  AxisUses last;             // empty: there was no call yet
  std::set<AxisUses> known;  // to be the same on every rank
};

}  // namespace switchyard
