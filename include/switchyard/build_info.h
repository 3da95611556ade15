// What this build can do, and what of it can be used on this machine now.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

struct Feature {
  std::string name;
  bool available = false;
  std::string detail;  // a version or a description, or why it cannot be used
};

SWITCHYARD_API std::string_view version();
// Libraries that the build may be made with.
SWITCHYARD_API std::vector<Feature> build_features();
SWITCHYARD_API std::vector<Feature> devices();
SWITCHYARD_API std::vector<Feature> communicator_backends();

}  // namespace switchyard
