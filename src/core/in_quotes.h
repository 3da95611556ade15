// Names from files, fit for messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace switchyard {

constexpr std::size_t kMaxInQuotes = 128;

// 'text', shortened where a file has something absurd, with control characters as \x1b: what a file
// has in its names must neither end a message nor reach a terminal. Still UTF-8.
std::string in_quotes(std::string_view text);

}  // namespace switchyard
