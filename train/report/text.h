// SPDX-License-Identifier: Apache-2.0
// Turns arbitrary bytes into text for an HTML page.
#pragma once

#include <string>
#include <string_view>

namespace switchyard::train {

// Returns valid UTF-8, escaped for use between tags and in quoted attributes. Invalid UTF-8 becomes
// U+FFFD, and control characters other than tab and line feed become visible.
std::string escaped(std::string_view bytes);

}  // namespace switchyard::train
