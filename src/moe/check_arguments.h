// Checks of one rank's arguments to a collective operation.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "switchyard/communicator.h"
#include "switchyard/error.h"

namespace switchyard {

// Runs checks. The other ranks are on their way into a collective of one of these communicators,
// and learn of a failure at once.
template <typename Checks>
void check_arguments(std::string_view operation, std::initializer_list<Communicator*> comms,
                     Checks checks) {
  try {
    checks();
  } catch (const InvalidArgument& error) {
    const auto message = std::string(operation) + ": " + error.what();
    for (Communicator* comm : comms) comm->abort(message);
    throw InvalidArgument(message);
  }
}

}  // namespace switchyard
