// What one rank does for all, and whose failure is everybody's.
#pragma once

#include <functional>

#include "switchyard/communicator.h"

namespace switchyard::train {

// Collective. Runs fn on rank 0; an error of it is thrown on every rank, as a StorageError if it
// was one, else as an InvalidArgument.
void on_rank_0(Communicator& world, const std::function<void()>& fn);

}  // namespace switchyard::train
