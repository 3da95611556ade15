// SPDX-License-Identifier: Apache-2.0
// Named axes over the ranks of a world.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/export.h"

namespace switchyard {

// An axis of a Mesh.
struct MeshAxis {
  std::string name;
  int size = 1;
};

struct AgreedAxes;

// The ranks of a world laid out along named axes, outermost first: the last axis holds neighbouring
// ranks. The world must outlive the mesh.
class SWITCHYARD_API Mesh {
 public:
  // Lays out the world along `axes`. Throws InvalidArgument unless their sizes multiply to the size
  // of the world. Not collective.
  Mesh(Communicator& world, std::vector<MeshAxis> axes);
  Mesh(const Mesh&) = delete;  // not movable either: others keep pointers to its communicators
  Mesh& operator=(const Mesh&) = delete;

  Communicator& world() const { return world_; }
  const std::vector<MeshAxis>& axes() const { return axes_; }
  // Returns whether the mesh has an axis of this name.
  bool has_axis(std::string_view axis) const;
  // The number of ranks along the axis. Throws InvalidArgument if there is no such axis.
  int size(std::string_view axis) const;
  // The position of this rank along the axis. Throws InvalidArgument if there is no such axis.
  int coordinate(std::string_view axis) const;
  // Returns the communicator of the ranks that differ from this one only along the given axes, in
  // the order of the world. Axes are listed outermost first. The first call for a list of axes is
  // collective over the world; later calls return the same communicator.
  Communicator& comm(const std::vector<std::string>& axes);

 private:
  friend struct AgreedAxes;

  std::size_t index_of(std::string_view axis) const;
  int coordinate_at(std::size_t axis) const;

  Communicator& world_;
  std::vector<MeshAxis> axes_;
  std::vector<int> strides_;  // distance in ranks between neighbours along each axis
  std::map<std::vector<std::string>, std::unique_ptr<Communicator>> comms_;  // by axes
  std::shared_ptr<AgreedAxes> agreed_axes_;  // state of reduce_gradients between calls
};

}  // namespace switchyard
