// Adds whole numbers up over ranks.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "switchyard/communicator.h"

namespace switchyard {

// Collective: one exchange for all of them, which have the same sizes on every rank.
void sum_integers(Communicator& comm, std::initializer_list<std::span<std::int64_t>> numbers);

}  // namespace switchyard
