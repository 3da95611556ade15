// Notices when another process of this host ends.
#pragma once

#include <cstdint>
#include <memory>

#include "core/descriptor.h"

namespace switchyard {

class ProcessWatch {
 public:
  // The watch of a process. All users in this process share it, so that the number of descriptors
  // does not grow with the number of groups.
  static std::shared_ptr<const ProcessWatch> of(std::int64_t pid);

  explicit ProcessWatch(std::int64_t pid);

  std::int64_t pid() const { return pid_; }
  bool has_ended() const;

 private:
  std::int64_t pid_;
  Descriptor process_;      // not open where no descriptor was left
  bool had_ended_ = false;  // before it could be watched
};

}  // namespace switchyard
