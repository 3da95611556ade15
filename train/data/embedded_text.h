// SPDX-License-Identifier: Apache-2.0
// The default training text, embedded by the build.
#pragma once

#include <string_view>

namespace switchyard::train {

// Returns all files, each after a line with its name.
std::string_view embedded_text();

}  // namespace switchyard::train
