// SPDX-License-Identifier: Apache-2.0
// Sums integers over ranks.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "switchyard/communicator.h"

namespace switchyard {

// Collective. Replaces all numbers by their sums over the ranks, in one exchange. The spans must
// have the same sizes on every rank.
void sum_integers(Communicator& comm, std::initializer_list<std::span<std::int64_t>> numbers);

}  // namespace switchyard
