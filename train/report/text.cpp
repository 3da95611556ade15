// SPDX-License-Identifier: Apache-2.0
#include "report/text.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace switchyard::train {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// The lead bytes of multi-byte characters and the allowed range of the second byte, from the
// Unicode table of well-formed sequences. Further bytes are 80..BF.
struct Lead {
  std::uint8_t first, last;
  std::size_t length;
  std::uint8_t second_from, second_to;
};
constexpr std::array<Lead, 9> kLeads{{
    {0xC2, 0xC2, 2, 0xA0, 0xBF},  // excludes U+0080 to U+009F, which are controls too
    {0xC3, 0xDF, 2, 0x80, 0xBF},
    {0xE0, 0xE0, 3, 0xA0, 0xBF},
    {0xE1, 0xEC, 3, 0x80, 0xBF},
    {0xED, 0xED, 3, 0x80, 0x9F},
    {0xEE, 0xEF, 3, 0x80, 0xBF},
    {0xF0, 0xF0, 4, 0x90, 0xBF},
    {0xF1, 0xF3, 4, 0x80, 0xBF},
    {0xF4, 0xF4, 4, 0x80, 0x8F},
}};

struct Character {
  std::size_t length = 1;  // bytes consumed
  bool is_valid = false;
};

// Decodes a multi-byte character. A broken one consumes the bytes that could have started a
// character.
Character character_at(std::string_view bytes) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(bytes[i]); };
  const auto* lead = std::find_if(kLeads.begin(), kLeads.end(), [&](const Lead& l) {
    return byte(0) >= l.first && byte(0) <= l.last;
  });
  if (lead == kLeads.end()) return {};
  for (std::size_t i = 1; i < lead->length; ++i) {
    const auto from = i == 1 ? lead->second_from : std::uint8_t{0x80};
    const auto to = i == 1 ? lead->second_to : std::uint8_t{0xBF};
    if (i >= bytes.size() || byte(i) < from || byte(i) > to) return {.length = i};
  }
  return {.length = lead->length, .is_valid = true};
}

void append_ascii(std::string& text, char c) {
  constexpr char kDelete = 0x7F;
  switch (c) {
    case '&':
      text += "&amp;";
      return;
    case '<':
      text += "&lt;";
      return;
    case '>':
      text += "&gt;";
      return;
    case '"':
      text += "&quot;";
      return;
    case '\'':
      text += "&#39;";
      return;
    default:
      break;
  }
  if (c == kDelete) {
    text += "\xE2\x90\xA1";  // U+2421
  } else if (c >= ' ' || c == '\t' || c == '\n') {
    text += c;
  } else {  // U+2400 onwards are pictures of the controls, in order
    text += "\xE2\x90";
    text += static_cast<char>(0x80 + c);
  }
}

}  // namespace

std::string escaped(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  while (!bytes.empty()) {
    if (static_cast<std::uint8_t>(bytes[0]) < 0x80) {
      append_ascii(text, bytes[0]);
      bytes.remove_prefix(1);
      continue;
    }
    const auto character = character_at(bytes);
    text += character.is_valid ? bytes.substr(0, character.length) : kReplacement;
    bytes.remove_prefix(character.length);
  }
  return text;
}

}  // namespace switchyard::train
