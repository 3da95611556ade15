// SPDX-License-Identifier: Apache-2.0
// Reads JSON as a stream of events. An unexpected value is rejected where it begins, so a hostile
// file cannot make the reader nest, keep or compare more than the format allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "switchyard/error.h"

namespace switchyard {

// Rejects every value that a derived class does not accept. Messages call the text `what` and name
// `file`.
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonReader(const std::string& file, std::string_view what) : file_(file), what_(what) {}

  // Throws InvalidArgument if `text` is not JSON or a value is rejected.
  void read(std::string_view text);

  bool start_object(std::size_t /*elements*/) override { return refuse("an object"); }
  bool start_array(std::size_t /*elements*/) override { return refuse("an array"); }
  bool end_array() override { return true; }
  bool string(std::string& /*value*/) override { return refuse("a string"); }
  bool number_unsigned(std::uint64_t value) override { return refuse(std::to_string(value)); }
  bool number_integer(std::int64_t value) override { return refuse(std::to_string(value)); }
  bool number_float(double /*value*/, const std::string& text) override { return refuse(text); }
  bool boolean(bool value) override { return refuse(value ? "true" : "false"); }
  bool null() override { return refuse("null"); }
  bool binary(nlohmann::json::binary_t& /*value*/) override { return refuse("binary"); }
  bool parse_error(std::size_t position, const std::string& token,
                   const nlohmann::json::exception& error) override;

 protected:
  // Throws the refusal(…) that says what belongs where `found` was read.
  [[noreturn]] virtual bool refuse(const std::string& found) const = 0;

  // Makes the error "FILE: WHAT must be WANTED, not FOUND".
  InvalidArgument refusal(std::string_view what, std::string_view wanted,
                          std::string_view found) const;

  const std::string& file() const { return file_; }

 private:
  const std::string& file_;
  std::string_view what_;
};

}  // namespace switchyard
