// SPDX-License-Identifier: Apache-2.0
// The switchyard command.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "command_line.h"
#include "commands.h"
#include "common/bus_faults.h"
#include "common/printable.h"
#include "switchyard/build_info.h"
#include "unknown_argument.h"

namespace {

using switchyard::train::printable;
using switchyard::train::printable_lines;

// Unlike fmt::print, std::fputs does not throw if standard error is full or closed.
int failed(int status, const std::string& message) {
  std::fputs(("switchyard: " + message + "\n").c_str(), stderr);
  return status;
}

// Reports an unknown argument rather than the required one that is missing because of it.
std::string words_for(const CLI::ParseError& error, const CLI::App& app) {
  const bool is_about_arguments = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
                                  dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  const auto unknown = is_about_arguments ? switchyard::cli::words_for_unknown(app) : std::string();
  return unknown.empty() ? error.what() : unknown;
}

}  // namespace

int main(int argc, char** argv) {
  switchyard::train::explain_bus_faults();
  CLI::App app{"Expert parallelism for Mixture-of-Experts models.", "switchyard"};
  app.set_version_flag("--version", std::string(switchyard::version()));
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::help);
  switchyard::cli::add_bench_command(app);
  switchyard::cli::add_info_command(app);
  switchyard::cli::add_inspect_command(app);
  switchyard::cli::add_sample_command(app);
  switchyard::cli::add_soak_command(app);
  switchyard::cli::add_train_command(
      app, switchyard::cli::command_line({argv, static_cast<std::size_t>(argc)}));
  switchyard::cli::add_verify_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked_for_help) {
    app.exit(asked_for_help, std::cout);
    std::cout.flush();
  } catch (const CLI::RuntimeError& said_already) {
    return said_already.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return failed(2, printable_lines(words_for(error, app)) +
                         "\nTry switchyard --help, or --help after a subcommand.");
  } catch (const std::exception& error) {
    return failed(1, printable(error.what()));
  }
  // Fails if output was lost, so that nobody takes a part of it for the whole.
  const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  return is_written ? 0 : failed(1, "cannot write to the standard output");
}
