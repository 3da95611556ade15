// SPDX-License-Identifier: Apache-2.0
// Objects cached in a communicator for later calls over it.
#pragma once

#include <memory>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard {

class KeptObject {
 public:
  virtual ~KeptObject() = default;
};

// The objects are destroyed with the communicator, whose size and rank they may still query then.
struct KeptObjects {
  static std::vector<std::shared_ptr<KeptObject>>& of(Communicator& comm) {
    return comm.kept_objects_;
  }
};

}  // namespace switchyard
