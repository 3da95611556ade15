// What goes wrong on one rank, told to all.
#pragma once

#include <functional>

#include "switchyard/communicator.h"

namespace switchyard::train {

// Collective. Runs work, which may fail on some ranks alone: then every rank throws what the lowest
// of them says, as a StorageError if it was one, else as an InvalidArgument. Only what a
// communicator throws passes: its ranks know already.
void together(Communicator& comm, const std::function<void()>& work);

// Collective. The same for what rank 0 does for all.
void on_rank_0(Communicator& comm, const std::function<void()>& work);

}  // namespace switchyard::train
