// Checks of one rank's arguments to a collective operation.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/error.h"

namespace switchyard {

// Runs checks. The other ranks are on their way into a collective of one of these communicators,
// and learn of a failure at once.
template <typename Checks>
void check_arguments(std::string_view operation, const std::vector<Communicator*>& comms,
                     Checks checks) {
  try {
    checks();
  } catch (const InvalidArgument& error) {
    const auto message = std::string(operation) + ": " + error.what();
    for (Communicator* comm : comms) comm->abort(message);
    throw InvalidArgument(message);
  }
}

// Collective. Throws InvalidArgument, the same on every rank, with what the first rank that has
// something to object to says; empty: nothing. The communicator stays usable.
void require_no_objection(Communicator& comm, std::string_view operation,
                          const std::string& objection);

// Runs checks of what a rank was made with, and tells all ranks what they found.
template <typename Checks>
void check_together(std::string_view operation, Communicator& comm, Checks checks) {
  std::string objection;
  try {
    checks();
  } catch (const InvalidArgument& error) {
    objection = error.what();
  }
  require_no_objection(comm, operation, objection);
}

}  // namespace switchyard
