// SPDX-License-Identifier: Apache-2.0
#include "common/printable.h"

#include <cstddef>
#include <cstdint>

namespace switchyard::train {
namespace {

struct Character {
  std::size_t bytes = 1;
  std::uint32_t code = 0;  // also 0 if the bytes are not valid UTF-8
};

Character first_of(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80U) return {1, lead};
  const std::size_t bytes = lead < 0xe0U ? 2 : lead < 0xf0U ? 3 : 4;
  if (lead < 0xc2U || lead > 0xf4U || text.size() < bytes) return {};
  std::uint32_t code = lead & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0U) != 0x80U) return {};
    code = (code << 6U) | (byte(i) & 0x3fU);
  }
  return {bytes, code};
}

bool is_shown(std::uint32_t code) {
  const auto within = [code](std::uint32_t a, std::uint32_t b) { return a <= code && code <= b; };
  return !within(0, 0x1f) && !within(0x7f, 0x9f) && !within(0x202a, 0x202e) &&
         !within(0x2066, 0x2069);
}

std::string printable_but(std::string_view text, std::string_view kept) {
  std::string result;
  while (!text.empty()) {
    const auto [bytes, code] = first_of(text);
    const bool is_kept = kept.find(text.front()) != std::string_view::npos;
    result += is_kept || is_shown(code) ? text.substr(0, bytes) : "?";
    text.remove_prefix(bytes);
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) { return printable_but(text, ""); }

std::string printable_lines(std::string_view text) { return printable_but(text, "\n\t"); }

}  // namespace switchyard::train
