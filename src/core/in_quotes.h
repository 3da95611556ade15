// Names from files, fit for messages.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string_view>

namespace switchyard {

constexpr std::size_t kMaxInQuotes = 128;

struct InQuotes {
  std::string_view text;
};

// Formats as 'text', shortened where a file has something absurd, with control characters, those
// that turn the direction of text, and what is no UTF-8 as \x1b: what a file has in its names must
// neither end a message nor reach a terminal. Still UTF-8.
// Nothing is made before it is formatted, so that checks of thousands of names cost nothing.
inline InQuotes in_quotes(std::string_view text) { return {text}; }

}  // namespace switchyard

template <>
struct fmt::formatter<switchyard::InQuotes> : fmt::formatter<std::string_view> {
  fmt::appender format(switchyard::InQuotes quoted, fmt::format_context& context) const;
};
