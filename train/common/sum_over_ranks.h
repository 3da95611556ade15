// SPDX-License-Identifier: Apache-2.0
// Sums a few numbers over ranks, in double precision and in rank order.
#pragma once

#include <span>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard::train {

// Collective. Returns the same sums on every rank.
std::vector<double> sum_over_ranks(Communicator& comm, std::span<const double> values);

}  // namespace switchyard::train
