// Runs the switchyard command as a user would.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace switchyard::testing {

struct Outcome {
  int status = -1;
  std::string output;
};

// JSON is for programs: it is all there is on the standard output. (mpirun may grumble on the
// other.)
inline Outcome run(const std::string& arguments, const std::string& launcher = "") {
  const bool json_only = arguments.find("--json") != std::string::npos;
  const std::string command = launcher + " " + SWITCHYARD_COMMAND + " " + arguments +
                              (json_only ? " 2>/dev/null" : " 2>&1");
  FILE* pipe = ::popen(command.c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer{};
  while (const auto n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    outcome.output.append(buffer.data(), n);
  }
  outcome.status = WEXITSTATUS(::pclose(pipe));
  return outcome;
}

inline std::vector<nlohmann::json> lines_of(const Outcome& outcome) {
  std::vector<nlohmann::json> lines;
  std::istringstream stream(outcome.output);
  for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

}  // namespace switchyard::testing
