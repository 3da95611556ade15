// Options made from the values that they set: how each kind of value is written and read.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <map>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#include "options/options.h"
#include "switchyard/error.h"

namespace switchyard::train {

// Name, group, type and help; what is about values follows.
Option option(std::string name, std::string type, std::string help);

template <typename T>
struct Range {
  T least;
  T most;
};

// All of the text must be a number of the range.
template <typename T>
T parse_number(const std::string& name, const std::string& text, Range<T> range) {
  T number{};
  const char* const end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, number);
  const bool is_number = error == std::errc() && next == end;
  if (is_number && number >= range.least && number <= range.most) return number;
  throw InvalidArgument(fmt::format("--{} \"{}\" is not a {} from {} to {}", name, text,
                                    std::is_integral_v<T> ? "whole number" : "number", range.least,
                                    range.most));
}

template <typename T>
Option number_option(std::string name, T& value, Range<std::type_identity_t<T>> range,
                     std::string help) {
  Option o = option(std::move(name), std::is_integral_v<T> ? "N" : "X", std::move(help));
  o.set = [&value, range, name = o.name](const std::string& text) {
    value = parse_number<T>(name, text, range);
  };
  o.get = [&value] { return fmt::to_string(value); };
  return o;
}

template <typename T>
Option choice_option(std::string name, T& value, std::vector<std::pair<std::string, T>> choices,
                     std::string help) {
  std::string names;
  for (const auto& choice : choices) names += (names.empty() ? "" : "|") + choice.first;
  Option o = option(std::move(name), names, std::move(help));
  o.set = [&value, choices, name = o.name, names](const std::string& text) {
    for (const auto& [known, meaning] : choices) {
      if (known != text) continue;
      value = meaning;
      return;
    }
    throw InvalidArgument(fmt::format("--{} \"{}\" is not one of {}", name, text, names));
  };
  o.get = [&value, choices] {
    for (const auto& [known, meaning] : choices) {
      if (meaning == value) return known;
    }
    return std::string();
  };
  return o;
}

// An empty path is written as `empty`, and either of them sets it.
Option path_option(std::string name, std::string& value, const std::string& empty,
                   std::string help);
Option text_option(std::string name, std::string& value, std::string help);

}  // namespace switchyard::train
