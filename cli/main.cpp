// The switchyard command.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "commands.h"
#include "common/printable.h"
#include "switchyard/build_info.h"

namespace {

using switchyard::train::printable;
using switchyard::train::printable_lines;

// Unlike fmt::print it does not throw where the standard error is full, or closed.
int failed(int status, const std::string& message) {
  std::fputs(("switchyard: " + message + "\n").c_str(), stderr);
  return status;
}

}  // namespace

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
    return failed(2, printable_lines(error.what()) +
                         "\nTry switchyard --help, or --help after a subcommand.");
  } catch (const std::exception& error) {
    return failed(1, printable(error.what()));
  }
  // Who reads the output must not take what is there for all of it.
  const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  return is_written ? 0 : failed(1, "the standard output could not be written");
}
