// Text that somebody else wrote, fit for a terminal.
#pragma once

#include <string>
#include <string_view>

namespace switchyard::train {

// With "?" for every control character, those of C1 and those that turn the direction of text among
// them, and for every byte that is no UTF-8.
std::string printable(std::string_view text);
// The same, but newlines and tabs stay.
std::string printable_lines(std::string_view text);

}  // namespace switchyard::train
