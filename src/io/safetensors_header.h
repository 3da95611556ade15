// The JSON header of a safetensors file as a table of its tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard {

constexpr std::string_view kSafetensorsMetadata = "__metadata__";
constexpr std::uint64_t kMaxSafetensorsHeader =
    100'000'000;  // the limit of the format's own reader

// "F32": what the format calls it.
std::string_view safetensors_name(Dtype dtype);

struct SafetensorsEntry {
  std::string dtype_name;      // as the file says it
  std::optional<Dtype> dtype;  // none: not one of ours
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  // bytes begin … end − 1 of what follows the header
  std::int64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> entries;
  std::map<std::string, std::string> metadata;
};

// Every field is there, once and of its type, and no number is negative; whether shapes and ranges
// of bytes fit each other and the file is for the caller to check. `file` is its name for messages.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file);

}  // namespace switchyard
