// Objects over a communicator that later calls over it use again.
#pragma once

#include <memory>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard {

class KeptObject {
 public:
  virtual ~KeptObject() = default;
};

// They go with the communicator, whose size and rank they may still ask for then.
struct KeptObjects {
  static std::vector<std::shared_ptr<KeptObject>>& of(Communicator& comm) {
    return comm.kept_objects_;
  }
};

}  // namespace switchyard
