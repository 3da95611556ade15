// SPDX-License-Identifier: Apache-2.0
// The command line as one would type it.
#pragma once

#include <span>
#include <string>

namespace switchyard::cli {

// Joins the arguments, and quotes those that a shell would change.
std::string command_line(std::span<const char* const> arguments);

}  // namespace switchyard::cli
