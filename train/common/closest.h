// Finds the name that was meant by one that there is not.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace switchyard::train {

// The first of those that take the fewest letters to change, add or leave out. There must be one.
std::string closest_to(std::string_view name, const std::vector<std::string>& names);

}  // namespace switchyard::train
