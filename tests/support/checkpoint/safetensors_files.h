// SPDX-License-Identifier: Apache-2.0
// Safetensors files, written byte by byte in a temporary folder.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>

#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"
#include "switchyard/safetensors.h"

namespace switchyard::testing {

// Concatenates the header's length, the header and the data.
inline std::string file_of(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  return length + header + data;
}

template <typename T>
std::string bytes_of(std::initializer_list<T> values) {
  return {reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T)};
}

// Returns a header with one tensor "w" that has the given fields.
inline std::string one_tensor(const std::string& fields) { return R"({"w":{)" + fields + "}}"; }

inline std::string replace_all(std::string text, const std::string& what, const std::string& by) {
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

class SafetensorsFiles : public ::testing::Test {
 protected:
  // Creates a new file each time, so that views of an earlier one keep their contents.
  void write(const std::string& bytes) const {
    std::filesystem::remove(path_);
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  SafetensorsFile open(const std::string& header, const std::string& data) const {
    write(file_of(header, data));
    return SafetensorsFile::open(path_);
  }

  // Returns the error message, with the path replaced by FILE.
  std::string open_error(const std::filesystem::path& path) const {
    return replace_all(error_of<InvalidArgument>([&] { SafetensorsFile::open(path); }),
                       path.string(), "FILE");
  }
  std::string raw_error(const std::string& bytes) const {
    write(bytes);
    return open_error(path_);
  }
  std::string error(const std::string& header, std::size_t data_bytes = 0) const {
    return raw_error(file_of(header, std::string(data_bytes, '\0')));
  }
  template <typename Error>
  std::string tensor_error(const SafetensorsFile& file, const std::string& name) const {
    return replace_all(error_of<Error>([&] { (void)file.tensor(name); }), path_.string(), "FILE");
  }

  const Folder folder_;
  const std::filesystem::path directory_ = folder_.path();
  const std::filesystem::path path_ = directory_ / "x.safetensors";
};

}  // namespace switchyard::testing
