// SPDX-License-Identifier: Apache-2.0
// Detects when another process on this host ends.
#pragma once

#include <cstdint>
#include <memory>

#include "core/descriptor.h"

namespace switchyard {

class ProcessWatch {
 public:
  // Returns the watch of a process. All users in this process share one watch per pid, so that the
  // number of descriptors does not grow with the number of groups.
  static std::shared_ptr<const ProcessWatch> of(std::int64_t pid);

  explicit ProcessWatch(std::int64_t pid);

  std::int64_t pid() const { return pid_; }
  bool has_ended() const;

 private:
  std::int64_t pid_;
  Descriptor process_;      // a pidfd; not open if it could not be opened
  bool had_ended_ = false;  // true if the process ended before the watch began
};

}  // namespace switchyard
