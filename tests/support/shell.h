// SPDX-License-Identifier: Apache-2.0
// Runs shell commands.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace switchyard::testing {

struct Outcome {
  int status = -1;
  std::string output;  // stdout
};

inline Outcome shell(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer{};
  while (const auto n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    outcome.output.append(buffer.data(), n);
  }
  outcome.status = WEXITSTATUS(::pclose(pipe));
  return outcome;
}

}  // namespace switchyard::testing
