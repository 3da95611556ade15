// The communicator backends of this build. A new one is its folder, a declaration here and a line
// in registry.cpp.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "switchyard/communicator.h"

namespace switchyard {

// Longer ones are cut to this: a point of time that far off can still be computed.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

// Every rank of a thread group needs a stack of its own, so a group has at most this many.
constexpr int kMostThreadRanks = 4096;

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
