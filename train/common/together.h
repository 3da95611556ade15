// What goes wrong on one rank, told to all.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "switchyard/communicator.h"

namespace switchyard::train {

// Collective. Runs work, which may fail on some ranks alone: then every rank throws what the lowest
// of them says, as a StorageError if it was one, else as an InvalidArgument. Only what a
// communicator throws passes: its ranks know already.
void together(Communicator& comm, const std::function<void()>& work);

// Collective. InvalidArgument on every rank if `mark` is not the same everywhere, as where a path
// leads to several files on several machines: "WHAT on rank 2 differs from the one on rank 0".
void require_same(Communicator& comm, std::uint64_t mark, const std::string& what);

// Collective. What together() does, for what rank 0 does for all.
void on_rank_0(Communicator& comm, const std::function<void()>& work);

}  // namespace switchyard::train
