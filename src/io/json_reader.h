// Reads JSON event by event: what does not belong is refused where it begins, so nothing in a
// hostile file is nested, kept or compared beyond what the format has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "switchyard/error.h"

namespace switchyard {

// Refuses every value that a derived class does not take. Messages call the text `what`, of `file`.
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonReader(const std::string& file, std::string_view what) : file_(file), what_(what) {}

  // InvalidArgument if it is not JSON, or anything was refused.
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
  // Throws refusal(…) of what stands where `found` was.
  [[noreturn]] virtual bool refuse(const std::string& found) const = 0;

  // "FILE: what must be wanted, not found"
  InvalidArgument refusal(std::string_view what, std::string_view wanted,
                          std::string_view found) const;

  const std::string& file() const { return file_; }

 private:
  const std::string& file_;
  std::string_view what_;
};

}  // namespace switchyard
