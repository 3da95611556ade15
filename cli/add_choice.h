// SPDX-License-Identifier: Apache-2.0
// Flags with named values.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <string>

namespace switchyard::cli {

// Adds a flag that takes one of the names in `choices`; the error for any other text lists them.
// `value` must outlive the command.
template <typename Value, typename T>
CLI::Option* add_choice(CLI::App* command, const std::string& flag, Value& value,
                        const std::string& help, const std::map<std::string, T>& choices) {
  std::string names;
  for (const auto& [name, choice] : choices) names += (names.empty() ? "" : "|") + name;
  const auto pick = [&value, choices, flag, names](const std::string& text) {
    const auto found = choices.find(text);
    if (found == choices.end()) {
      throw CLI::ValidationError(flag, fmt::format("\"{}\" is not one of {}", text, names));
    }
    value = found->second;
  };
  return command->add_option_function<std::string>(flag, pick, help)->type_name(names);
}

}  // namespace switchyard::cli
