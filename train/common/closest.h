// SPDX-License-Identifier: Apache-2.0
// Finds the name that an unknown one was probably meant to be.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace switchyard::train {

// Returns the name with the smallest edit distance; the first of them on a tie. `names` must not be
// empty.
std::string closest_to(std::string_view name, const std::vector<std::string>& names);

}  // namespace switchyard::train
