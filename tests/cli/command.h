// SPDX-License-Identifier: Apache-2.0
// Runs the switchyard command as a user would.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/shell.h"

namespace switchyard::testing {

// JSON is for programs: it is all there is on the standard output. (mpirun may grumble on the
// other.)
inline Outcome run(const std::string& arguments, const std::string& launcher = "") {
  const bool json_only = arguments.find("--json") != std::string::npos;
  return shell(launcher + " " + SWITCHYARD_COMMAND + " " + arguments +
               (json_only ? " 2>/dev/null" : " 2>&1"));
}

inline std::vector<nlohmann::json> lines_of(const Outcome& outcome) {
  std::vector<nlohmann::json> lines;
  std::istringstream stream(outcome.output);
  for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

}  // namespace switchyard::testing
