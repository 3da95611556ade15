// The switchyard command.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "commands.h"
#include "common/printable.h"
#include "switchyard/build_info.h"

int main(int argc, char** argv) {
  CLI::App app{"Expert parallelism for Mixture-of-Experts models.", "switchyard"};
  app.set_version_flag("--version", std::string(switchyard::version()));
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::help);
  switchyard::cli::add_bench_command(app);
  switchyard::cli::add_info_command(app);
  switchyard::cli::add_inspect_command(app);
  switchyard::cli::add_sample_command(app);
  switchyard::cli::add_train_command(app);
  switchyard::cli::add_verify_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked_for_help) {
    return app.exit(asked_for_help);
  } catch (const CLI::RuntimeError& said_already) {
    return said_already.get_exit_code();
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "switchyard: {}\nTry switchyard --help, or --help after a subcommand.\n",
               switchyard::train::printable_lines(error.what()));
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "switchyard: {}\n", switchyard::train::printable(error.what()));
    return 1;
  }
  return 0;
}
