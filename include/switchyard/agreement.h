// SPDX-License-Identifier: Apache-2.0
// Collective checks: an error on one rank becomes the same error on all of them, so no rank waits
// for one that failed.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "switchyard/communicator.h"
#include "switchyard/export.h"

namespace switchyard {

// Runs `work` on every rank and throws on all of them if it throws on any. Collective. The error is
// that of the lowest rank that threw, "operation: rank 2: message"; it keeps its type if that is
// StorageError or Unsupported, and is an InvalidArgument otherwise. The communicator stays usable.
// A CommunicationError is not exchanged but rethrown as it is, because the other ranks already know
// of it.
SWITCHYARD_API void agree(Communicator& comm, std::string_view operation,
                          const std::function<void()>& work);
// As above, but leaves the message unchanged, for messages that already say what failed and where.
SWITCHYARD_API void agree(Communicator& comm, const std::function<void()>& work);

// Throws the same InvalidArgument on every rank if the ranks' values are not all equal. Collective.
// The message reads "ranks disagree about WHAT: rank 0 has 3, rank 2 has 4".
SWITCHYARD_API void require_equal(Communicator& comm, std::string_view what, std::int64_t value);

}  // namespace switchyard
