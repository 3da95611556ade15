#include "core/in_quotes.h"

#include <fmt/format.h>

#include <algorithm>

namespace switchyard {
namespace {

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == '\x7f'; }

bool is_within_character(char c) { return (static_cast<unsigned char>(c) & 0xc0U) == 0x80U; }

}  // namespace

std::string in_quotes(std::string_view text) {
  std::size_t kept = std::min(text.size(), kMaxInQuotes);
  while (kept < text.size() && kept > 0 && is_within_character(text[kept])) --kept;
  std::string result = "'";
  for (const char c : text.substr(0, kept)) {
    if (is_control(c)) {
      result += fmt::format("\\x{:02x}", c);
    } else {
      result += c;
    }
  }
  return result + (kept < text.size() ? "…'" : "'");
}

}  // namespace switchyard
