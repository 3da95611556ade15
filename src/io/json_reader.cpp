// SPDX-License-Identifier: Apache-2.0
#include "io/json_reader.h"

#include "core/in_quotes.h"
#include "core/require.h"

namespace switchyard {

void JsonReader::read(std::string_view text) {
  // The parser would take a zero byte for the end of the text and ignore the rest.
  const auto zero = text.find('\0');
  require(zero == std::string_view::npos, "{}: {} is not valid JSON from its byte {} on", file_,
          what_, zero + 1);
  nlohmann::json::sax_parse(text.begin(), text.end(), this);
}

bool JsonReader::parse_error(std::size_t position, const std::string& /*token*/,
                             const nlohmann::json::exception& /*error*/) {
  throw InvalidArgument(
      fmt::format("{}: {} is not valid JSON from its byte {} on", file_, what_, position));
}

InvalidArgument JsonReader::refusal(std::string_view what, std::string_view wanted,
                                    std::string_view found) const {
  return InvalidArgument(
      fmt::format("{}: {} must be {}, not {}", file_, what, wanted, found.substr(0, kMaxInQuotes)));
}

}  // namespace switchyard
