// Names the argument that no command takes, and the one that may have been meant.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace switchyard::cli {

// Names the first such argument after a failed parse, and the closest that there is; empty: all
// were taken.
std::string words_for_unknown(const CLI::App& app);

}  // namespace switchyard::cli
