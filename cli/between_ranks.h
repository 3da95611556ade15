// SPDX-License-Identifier: Apache-2.0
// Small exchanges between the ranks of a command.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard::cli {

// Collective. Returns the values of all ranks, [ranks][n]; n must be the same on every rank.
std::vector<double> gather_numbers(Communicator& comm, const std::vector<double>& values);
// Collective. Returns the sum, minimum or maximum of the ranks' values.
std::int64_t reduce_number(Communicator& comm, std::int64_t value, ReduceOp op = ReduceOp::sum);

// Collective. Calls `body` with a communicator of its own, so that an error leaves `comm` usable.
// Returns the error, the same on every rank, or an empty string. An error that arose on a rank is
// preferred to one that a rank reports about another.
std::string try_on_ranks(Communicator& comm, const std::function<void(Communicator&)>& body);

}  // namespace switchyard::cli
