// SPDX-License-Identifier: Apache-2.0
// Splits a world along its axes.
#include "switchyard/mesh.h"

#include <algorithm>

#include "core/require.h"

namespace switchyard {
namespace {

std::string describe(const std::vector<MeshAxis>& axes) {
  std::vector<std::string> parts;
  for (const MeshAxis& axis : axes) parts.push_back(fmt::format("{}={}", axis.name, axis.size));
  return fmt::format("({})", fmt::join(parts, ", "));
}

}  // namespace

Mesh::Mesh(Communicator& world, std::vector<MeshAxis> axes)
    : world_(world), axes_(std::move(axes)), strides_(axes_.size()) {
  std::int64_t ranks = 1;
  for (std::size_t i = axes_.size(); i-- > 0;) {
    const MeshAxis& axis = axes_[i];
    require(!axis.name.empty(), "axis {} of mesh {} has no name", i, describe(axes_));
    require(axis.size > 0, "axis \"{}\" of mesh {} must be positive", axis.name, describe(axes_));
    require(std::ranges::count(axes_, axis.name, &MeshAxis::name) == 1,
            "mesh {} has axis \"{}\" twice", describe(axes_), axis.name);
    strides_[i] = static_cast<int>(ranks);
    ranks *= axis.size;  // cannot overflow: both factors are below 2^31
    require(ranks <= world.size(), "mesh {} needs more ranks than the {} of the world",
            describe(axes_), world.size());
  }
  require(ranks == world.size(), "mesh {} has {} ranks, but the world has {}", describe(axes_),
          ranks, world.size());
}

std::size_t Mesh::index_of(std::string_view axis) const {
  const auto found = std::ranges::find(axes_, axis, &MeshAxis::name);
  require(found != axes_.end(), "mesh {} has no axis \"{}\"", describe(axes_), axis);
  return static_cast<std::size_t>(found - axes_.begin());
}

bool Mesh::has_axis(std::string_view axis) const {
  return std::ranges::find(axes_, axis, &MeshAxis::name) != axes_.end();
}

int Mesh::size(std::string_view axis) const { return axes_[index_of(axis)].size; }

int Mesh::coordinate(std::string_view axis) const { return coordinate_at(index_of(axis)); }

int Mesh::coordinate_at(std::size_t axis) const {
  return world_.rank() / strides_[axis] % axes_[axis].size;
}

Communicator& Mesh::comm(const std::vector<std::string>& axes) {
  std::vector<std::size_t> inside;
  for (const std::string& axis : axes) inside.push_back(index_of(axis));
  require(std::ranges::adjacent_find(inside, std::greater_equal<>()) == inside.end(),
          "axes ({}) must be distinct and in the order of mesh {}", fmt::join(axes, ", "),
          describe(axes_));
  auto& comm = comms_[axes];
  if (!comm) {
    // Ranks get the same color if they agree in every coordinate along the other axes.
    int color = world_.rank();
    for (const std::size_t axis : inside) color -= coordinate_at(axis) * strides_[axis];
    comm = world_.split(color, world_.rank());
  }
  return *comm;
}

}  // namespace switchyard
