// SPDX-License-Identifier: Apache-2.0
#include "command_line.h"

#include <string_view>

namespace switchyard::cli {
namespace {

constexpr std::string_view kPlain =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789%+,-./:=@_";

std::string in_shell_quotes(std::string_view argument) {
  std::string text = "'";
  for (const char c : argument) {
    text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return text + "'";
}

}  // namespace

std::string command_line(std::span<const char* const> arguments) {
  std::string line;
  for (const std::string_view argument : arguments) {
    if (!line.empty()) line += ' ';
    const bool is_plain =
        !argument.empty() && argument.find_first_not_of(kPlain) == std::string_view::npos;
    line += is_plain ? std::string(argument) : in_shell_quotes(argument);
  }
  return line;
}

}  // namespace switchyard::cli
