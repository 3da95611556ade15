// One JSON object a line, for programs.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace switchyard::cli {

// Names and messages come from files and paths, which may not be UTF-8.
inline void print_json_line(const nlohmann::json& line) {
  fmt::print("{}\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace switchyard::cli
