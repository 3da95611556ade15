// SPDX-License-Identifier: Apache-2.0
// Gathers strings of any length from all ranks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard {

// Collective. Returns every rank's bytes, indexed by rank. Takes one exchange if all are short,
// otherwise two.
std::vector<std::string> gather_strings(Communicator& comm, std::string_view own);

}  // namespace switchyard
