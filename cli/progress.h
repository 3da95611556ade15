// SPDX-License-Identifier: Apache-2.0
// A line on the terminal that shows the progress of a long command.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>

#include "switchyard/communicator.h"

namespace switchyard::cli {

// Replaces the line; an empty text removes it. Only rank 0 prints, and only to a terminal.
inline void show_progress(const Communicator& comm, std::string_view text) {
  if (comm.rank() != 0 || isatty(STDERR_FILENO) == 0) return;
  fmt::print(stderr, "\r{:60}\r{}", "", text);
  std::fflush(stderr);
}

}  // namespace switchyard::cli
