// What ranks of a command tell each other.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard::cli {

// Collective: [ranks][n], n being the same on every rank.
std::vector<double> gather_numbers(Communicator& comm, const std::vector<double>& values);
// Collective: the sum, least or greatest of the ranks' values.
std::int64_t reduce_number(Communicator& comm, std::int64_t value, ReduceOp op = ReduceOp::sum);

// Collective: calls `body` with a communicator of its own, so that an error leaves `comm` usable.
// Returns the error, the same on every rank: of a rank that did not only hear of it from another;
// empty if there was none.
std::string try_on_ranks(Communicator& comm, const std::function<void(Communicator&)>& body);

}  // namespace switchyard::cli
