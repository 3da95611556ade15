// The communicator backends of this build. A new one is its folder, a declaration here and a line
// in registry.cpp.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "switchyard/communicator.h"

namespace switchyard {

struct Availability {
  bool available = false;
  std::string detail;
};

struct BackendEntry {
  std::string_view name;
  Availability (*availability)();
  std::unique_ptr<Communicator> (*connect)(const ConnectOptions& options);
};

namespace threads {
BackendEntry backend();
}
namespace mpi {
BackendEntry backend();
}

}  // namespace switchyard
