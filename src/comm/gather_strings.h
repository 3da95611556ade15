// Tells all ranks what each has to say, however long it is.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard {

// Collective. Every rank's bytes, by rank: one exchange where all are short, otherwise two.
std::vector<std::string> gather_strings(Communicator& comm, std::string_view own);

}  // namespace switchyard
