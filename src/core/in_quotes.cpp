#include "core/in_quotes.h"

#include <algorithm>
#include <string>

namespace switchyard {
namespace {

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == '\x7f'; }

bool is_within_character(char c) { return (static_cast<unsigned char>(c) & 0xc0U) == 0x80U; }

}  // namespace
}  // namespace switchyard

fmt::appender fmt::formatter<switchyard::InQuotes>::format(switchyard::InQuotes quoted,
                                                           fmt::format_context& context) const {
  const std::string_view text = quoted.text;
  std::size_t kept = std::min(text.size(), switchyard::kMaxInQuotes);
  while (kept < text.size() && kept > 0 && switchyard::is_within_character(text[kept])) --kept;
  std::string result = "'";
  for (const char c : text.substr(0, kept)) {
    result += switchyard::is_control(c) ? fmt::format("\\x{:02x}", c) : std::string(1, c);
  }
  result += kept < text.size() ? "…'" : "'";
  return fmt::formatter<std::string_view>::format(result, context);
}
