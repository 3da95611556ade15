// Hugging Face's index of a checkpoint in several files: which tensor is in which.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace switchyard {

struct SafetensorsIndex {
  std::map<std::string, std::string> weight_map;  // tensor to file, which is beside the index
  std::map<std::string, std::string> metadata;    // what is not a string, as its JSON text
};

// `text` is {"metadata": {…}, "weight_map": {"tensor": "file", …}}; "metadata" may be missing.
// Whether the files exist, and have the tensors, is for the caller to check. `file` is the index's
// name for messages.
SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& file);

}  // namespace switchyard
