// SPDX-License-Identifier: Apache-2.0
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
    100'000'000;  // the limit of the reference implementation

// Returns the format's name for a dtype: "F32".
std::string_view safetensors_name(Dtype dtype);

struct SafetensorsEntry {
  std::string dtype_name;      // as written in the file
  std::optional<Dtype> dtype;  // nullopt if the library has no such dtype
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  // the tensor's bytes [begin, end), counted from the end of the header
  std::int64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> entries;
  std::map<std::string, std::string> metadata;
};

// Parses a header. Ensures that every field is present exactly once and has its type, and that no
// number is negative. The caller must check that shapes and byte ranges fit each other and the
// file. Messages call the file `file`.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file);

}  // namespace switchyard
