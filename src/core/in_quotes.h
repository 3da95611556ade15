// SPDX-License-Identifier: Apache-2.0
// Quotes names that come from files, so that messages can show them safely.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string_view>

namespace switchyard {

constexpr std::size_t kMaxInQuotes = 128;

struct InQuotes {
  std::string_view text;
};

// Formats as 'text', cut to kMaxInQuotes bytes. Control characters, characters that change the text
// direction, and invalid UTF-8 are escaped like \x1b, so that a name from a file can neither end a
// message nor control a terminal. The result is valid UTF-8.
// All work happens on formatting, so checks that pass cost nothing even for thousands of names.
inline InQuotes in_quotes(std::string_view text) { return {text}; }

}  // namespace switchyard

template <>
struct fmt::formatter<switchyard::InQuotes> : fmt::formatter<std::string_view> {
  fmt::appender format(switchyard::InQuotes quoted, fmt::format_context& context) const;
};
