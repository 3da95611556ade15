// SPDX-License-Identifier: Apache-2.0
// The communicator backends of this build. To add one, create its folder, declare it here and list
// it in registry.cpp.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "switchyard/communicator.h"

namespace switchyard {

// Longer timeouts are cut to this, so that the deadline can still be represented.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

// The most ranks of a thread group: each needs a stack of its own.
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
