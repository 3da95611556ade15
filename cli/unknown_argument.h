// SPDX-License-Identifier: Apache-2.0
// Error messages for arguments that no command takes.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace switchyard::cli {

// Returns a message that names the first unknown argument of a failed parse and the closest known
// one, or an empty string if all arguments were known.
std::string words_for_unknown(const CLI::App& app);

}  // namespace switchyard::cli
