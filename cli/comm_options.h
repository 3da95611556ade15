// SPDX-License-Identifier: Apache-2.0
// The options --comm and --timeout, which every command with ranks has.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <string>

#include "launch.h"

namespace switchyard::cli {

// `comm` and `timeout` must outlive the command.
inline void add_comm_options(CLI::App* command, std::string& comm, std::chrono::seconds& timeout) {
  constexpr std::int64_t kLongest = 1'000'000;  // more than eleven days
  command->add_option("--comm", comm, "How ranks are connected [threads]")
      ->check(CLI::IsMember({"threads", "mpi"}));
  command
      ->add_option_function<std::int64_t>(
          "--timeout", [&timeout](std::int64_t value) { timeout = std::chrono::seconds(value); },
          "Seconds a rank waits for the others before it gives up; must be longer than writing a "
          "checkpoint takes [600]")
      ->check(CLI::Range(std::int64_t{1}, kLongest))
      ->type_name("SECONDS");
}

inline void add_comm_options(CLI::App* command, LaunchOptions& launch) {
  add_comm_options(command, launch.comm, launch.timeout);
}

}  // namespace switchyard::cli
