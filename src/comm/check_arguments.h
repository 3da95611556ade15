// Checks of one rank's arguments to a collective operation.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/error.h"

namespace switchyard {

// Runs what may fail on this rank alone, and returns what it returns. The ranks of these
// communicators must not wait for a rank that failed: they learn why, and the communicators are
// unusable. A rank that is alone keeps its own: nobody waits, and a capture that failed, say, may
// be tried again.
template <typename Error = std::exception, typename Work>
auto or_abort(const std::vector<Communicator*>& comms, std::string_view what, Work work) {
  try {
    return work();
  } catch (const Error& error) {
    for (Communicator* comm : comms) {
      if (comm->size() > 1) comm->abort(std::string(what) + ": " + error.what());
    }
    throw;
  }
}

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

// Collective. What the first rank that has something to object to says, the same on every rank;
// empty: nobody has. The communicator stays usable.
std::string first_objection(Communicator& comm, std::string_view operation,
                            const std::string& objection);

// Runs something that may fail on one rank alone, and tells all ranks: whatever it throws, they
// throw the same. Only what a communicator throws passes, of which its ranks know already.
template <typename Thrown, typename Work>
void succeed_together(std::string_view operation, Communicator& comm, Work work) {
  std::string objection;
  try {
    work();
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    objection = error.what();
    if (objection.empty()) objection = "an error that does not say what it is";
  }
  const auto first = first_objection(comm, operation, objection);
  if (!first.empty()) throw Thrown(first);
}

// Runs checks of what a rank was made with, and tells all ranks what they found.
template <typename Checks>
void check_together(std::string_view operation, Communicator& comm, Checks checks) {
  succeed_together<InvalidArgument>(operation, comm, checks);
}

}  // namespace switchyard
