// SPDX-License-Identifier: Apache-2.0
// Makes text from elsewhere safe to print on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace switchyard::train {

// Replaces with "?" every control character, including those of C1 and those that change the
// direction of text, and every byte that is not valid UTF-8.
std::string printable(std::string_view text);
// Like printable(), but keeps newlines and tabs.
std::string printable_lines(std::string_view text);

}  // namespace switchyard::train
