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

struct MeshAxis {
  std::string name;
  int size = 1;
};

struct AgreedAxes;

// The world's ranks laid out along axes, outermost first: the last axis holds neighbouring ranks.
// The world must outlive the mesh.
class SWITCHYARD_API Mesh {
 public:
  // The sizes multiply to the size of the world.
  Mesh(Communicator& world, std::vector<MeshAxis> axes);
  Mesh(const Mesh&) = delete;  // nor moved: its groups are used where it is
  Mesh& operator=(const Mesh&) = delete;

  Communicator& world() const { return world_; }
  const std::vector<MeshAxis>& axes() const { return axes_; }
  bool has_axis(std::string_view axis) const;
  int size(std::string_view axis) const;
  // Where this rank is along the axis.
  int coordinate(std::string_view axis) const;
  // The ranks that differ from this one along the given axes only, in the order of the world. The
  // axes are given outermost first. Collective over the world when first asked for.
  Communicator& comm(const std::vector<std::string>& axes);

 private:
  friend struct AgreedAxes;

  std::size_t index_of(std::string_view axis) const;
  int coordinate_at(std::size_t axis) const;

  Communicator& world_;
  std::vector<MeshAxis> axes_;
  std::vector<int> strides_;  // ranks from one coordinate of an axis to the next
  std::map<std::vector<std::string>, std::unique_ptr<Communicator>> comms_;  // by axes
  std::shared_ptr<AgreedAxes> agreed_axes_;  // of reduce_gradients, from call to call
};

}  // namespace switchyard
