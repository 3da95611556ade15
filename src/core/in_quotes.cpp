// SPDX-License-Identifier: Apache-2.0
#include "core/in_quotes.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace switchyard {
namespace {

bool is_within_character(char c) { return (static_cast<unsigned char>(c) & 0xc0U) == 0x80U; }

// Returns how many bytes at the start of `text` form one printable character. Returns 0 for control
// characters (C0, C1 and those that change the text direction) and for invalid UTF-8.
std::size_t shown_bytes(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80U) return lead >= 0x20U && lead != 0x7fU ? 1 : 0;
  const std::size_t bytes = lead < 0xe0U ? 2 : lead < 0xf0U ? 3 : 4;
  if (lead < 0xc2U || lead > 0xf4U || text.size() < bytes) return 0;
  std::uint32_t code = lead & (0x7fU >> bytes);
  for (const char c : text.substr(1, bytes - 1)) {
    if (!is_within_character(c)) return 0;
    code = (code << 6U) | (static_cast<unsigned char>(c) & 0x3fU);
  }
  const bool turns = (0x202aU <= code && code <= 0x202eU) || (0x2066U <= code && code <= 0x2069U);
  return code > 0x9fU && !turns ? bytes : 0;
}

std::string escaped(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto bytes = shown_bytes(text);
    result += bytes > 0 ? std::string(text.substr(0, bytes))
                        : fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return result;
}

}  // namespace
}  // namespace switchyard

fmt::appender fmt::formatter<switchyard::InQuotes>::format(switchyard::InQuotes quoted,
                                                           fmt::format_context& context) const {
  const std::string_view text = quoted.text;
  std::size_t kept = std::min(text.size(), switchyard::kMaxInQuotes);
  while (kept < text.size() && kept > 0 && switchyard::is_within_character(text[kept])) --kept;
  const auto result = fmt::format("'{}{}'", switchyard::escaped(text.substr(0, kept)),
                                  kept < text.size() ? "…" : "");
  return fmt::formatter<std::string_view>::format(result, context);
}
