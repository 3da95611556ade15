// A folder that all ranks of a test use, be they threads or processes.
#pragma once

#include <memory>

#include "comm/gather_strings.h"
#include "support/folder.h"
#include "switchyard/communicator.h"

namespace switchyard::testing {

// Made outside of on_ranks, so that it stays until all ranks have ended.
class SharedFolder {
 public:
  // Collective: where it is. Rank 0 makes it, once.
  std::filesystem::path path(Communicator& comm) {
    if (comm.rank() == 0 && !folder_) folder_ = std::make_unique<Folder>();
    return gather_strings(comm, comm.rank() == 0 ? folder_->path().string() : "").front();
  }

 private:
  std::unique_ptr<Folder> folder_;
};

}  // namespace switchyard::testing
