// How ranks agree: what fails on one of them fails on all, and none waits for it.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "switchyard/communicator.h"
#include "switchyard/export.h"

namespace switchyard {

// Collective. Runs work on every rank. If it throws on some, every rank throws what the lowest of
// them says, "operation: rank 2: message", as a StorageError or Unsupported if it was one and as an
// InvalidArgument otherwise. The communicator stays usable. A CommunicationError alone passes as it
// is: its ranks know already.
SWITCHYARD_API void agree(Communicator& comm, std::string_view operation,
                          const std::function<void()>& work);
// The same, but the message stays as it is: it says by itself what failed.
SWITCHYARD_API void agree(Communicator& comm, const std::function<void()>& work);

// Collective. Throws the same InvalidArgument on every rank if a rank's value is not rank 0's:
// "ranks disagree about WHAT: rank 0 has 3, rank 2 has 4".
SWITCHYARD_API void require_equal(Communicator& comm, std::string_view what, std::int64_t value);

}  // namespace switchyard
