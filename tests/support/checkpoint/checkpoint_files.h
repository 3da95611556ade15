// SPDX-License-Identifier: Apache-2.0
// Checkpoints of several files and an index, written byte by byte in a temporary folder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/checkpoint/safetensors_files.h"

namespace switchyard::testing {

// One tensor of any dtype. The length of `data` is what the header declares.
struct FileTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string data;
};
using FileTensors = std::map<std::string, FileTensor>;

inline FileTensor zeros(const std::string& dtype, const std::vector<std::int64_t>& shape,
                        std::size_t element_bytes) {
  std::size_t bytes = element_bytes;
  for (const auto extent : shape) bytes *= static_cast<std::size_t>(extent);
  return {dtype, shape, std::string(bytes, '\0')};
}

// Returns the bytes of a file with these tensors in name order. The header is padded to 8 bytes, as
// frameworks do.
inline std::string file_of(const FileTensors& tensors,
                           const std::map<std::string, std::string>& metadata = {}) {
  auto header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
    data += tensor.data;
  }
  auto text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return file_of(text, data);
}

class CheckpointFiles : public SafetensorsFiles {
 protected:
  std::filesystem::path put(const std::string& name, const std::string& bytes) const {
    const auto path = directory_ / name;
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  // Writes the tensors round-robin to `num_files` files "model-0.safetensors", …, so that related
  // tensors lie in different files. Returns the path of the index.
  std::filesystem::path put_shards(const FileTensors& tensors, std::size_t num_files) const {
    std::vector<FileTensors> shards(num_files);
    auto weight_map = nlohmann::json::object();
    std::size_t bytes = 0;
    std::size_t next = 0;
    for (const auto& [name, tensor] : tensors) {
      const auto shard = next++ % num_files;
      shards[shard].emplace(name, tensor);
      weight_map[name] = "model-" + std::to_string(shard) + ".safetensors";
      bytes += tensor.data.size();
    }
    for (std::size_t i = 0; i < num_files; ++i) {
      put("model-" + std::to_string(i) + ".safetensors", file_of(shards[i], {{"format", "pt"}}));
    }
    const nlohmann::json index = {{"metadata", {{"total_size", bytes}}},
                                  {"weight_map", weight_map}};
    return put("model.safetensors.index.json", index.dump(2));
  }
};

}  // namespace switchyard::testing
