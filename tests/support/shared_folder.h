// SPDX-License-Identifier: Apache-2.0
// A folder shared by all ranks of a test, whether threads or processes.
#pragma once

#include <memory>

#include "comm/gather_strings.h"
#include "support/folder.h"
#include "switchyard/communicator.h"

namespace switchyard::testing {

// Construct it outside on_ranks, so that it outlives all ranks.
class SharedFolder {
 public:
  // Returns the folder's path. Rank 0 creates it on the first call. Collective.
  std::filesystem::path path(Communicator& comm) {
    if (comm.rank() == 0 && !folder_) folder_ = std::make_unique<Folder>();
    return gather_strings(comm, comm.rank() == 0 ? folder_->path().string() : "").front();
  }

 private:
  std::unique_ptr<Folder> folder_;
};

}  // namespace switchyard::testing
