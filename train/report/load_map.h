// How evenly the experts of every layer were loaded, over time, as pictures.
#pragma once

#include <string>

#include "training/history.h"

namespace switchyard::train {

// Empty if there is no record of any pick.
std::string load_map_html(const RunSummary& run);

}  // namespace switchyard::train
