// SPDX-License-Identifier: Apache-2.0
// The subcommands. Each adds itself to the app; CLI11 runs the one that was chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace switchyard::cli {

void add_bench_command(CLI::App& app);
void add_info_command(CLI::App& app);
void add_inspect_command(CLI::App& app);
void add_sample_command(CLI::App& app);
void add_soak_command(CLI::App& app);
// The report of a run shows the command line.
void add_train_command(CLI::App& app, const std::string& command_line);
void add_verify_command(CLI::App& app);

}  // namespace switchyard::cli
