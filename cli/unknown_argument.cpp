// SPDX-License-Identifier: Apache-2.0
#include "unknown_argument.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common/closest.h"

namespace switchyard::cli {
namespace {

std::vector<std::string> options_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const auto* option : command.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::vector<std::string> subcommands_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const auto* sub : command.get_subcommands({})) names.push_back(sub->get_name());
  return names;
}

// `name` is the name of the command, preceded by those of its parent commands.
std::string words_for(const std::string& argument, const CLI::App& command,
                      const std::string& name) {
  const bool is_option = argument.starts_with('-');
  const auto written = is_option ? argument.substr(0, argument.find('=')) : argument;
  const auto names = is_option ? options_of(command) : subcommands_of(command);
  if (names.empty()) return fmt::format("\"{}\" is an unexpected argument for {}", written, name);
  return fmt::format("\"{}\" is not {} of {}{}", written, is_option ? "an option" : "a subcommand",
                     name, train::hint_at_closest(written, names));
}

}  // namespace

std::string words_for_unknown(const CLI::App& app) {
  const CLI::App* command = &app;
  for (std::string name = app.get_name();;) {
    const auto left = command->remaining();
    const auto unknown = std::ranges::find_if(left, [](const auto& text) { return text != "--"; });
    if (unknown != left.end()) return words_for(*unknown, *command, name);
    if (command->get_subcommands().empty()) return {};
    command = command->get_subcommands().front();
    name += " " + command->get_name();
  }
}

}  // namespace switchyard::cli
