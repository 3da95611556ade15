// SPDX-License-Identifier: Apache-2.0
// Prints one JSON object per line, for programs.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace switchyard::cli {

// Replaces invalid UTF-8: names and messages come from files and paths, which may contain some.
inline void print_json_line(const nlohmann::json& line) {
  fmt::print("{}\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace switchyard::cli
