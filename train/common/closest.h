// SPDX-License-Identifier: Apache-2.0
// Finds the name that an unknown one was probably meant to be.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace switchyard::train {

// Returns `; the closest is "…"` with the name of the smallest edit distance, the first of them on
// a tie. Returns nothing if half of the letters or more would have to change.
std::string hint_at_closest(std::string_view name, const std::vector<std::string>& names);

}  // namespace switchyard::train
