// SPDX-License-Identifier: Apache-2.0
// Hugging Face's index of a checkpoint in several files, which maps tensors to files.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace switchyard {

struct SafetensorsIndex {
  std::map<std::string, std::string> weight_map;  // tensor name to file name, beside the index
  std::map<std::string, std::string> metadata;    // numbers, booleans and null as JSON text
};

// Parses {"metadata": {…}, "weight_map": {"tensor": "file", …}}; "metadata" may be missing. The
// caller must check that the files exist and have the tensors. Messages call the index `file`.
SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& file);

}  // namespace switchyard
