// SPDX-License-Identifier: Apache-2.0
// A folder that is opened once, so that all reads see the same folder even if another one replaces
// it at its path.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/mapped_file.h"

namespace switchyard {

class OpenFolder {
 public:
  // Follows symbolic links. Throws InvalidArgument with the reason if it cannot be opened.
  explicit OpenFolder(std::filesystem::path path);
  ~OpenFolder();
  OpenFolder(const OpenFolder&) = delete;
  OpenFolder& operator=(const OpenFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Returns the names in ascending order. Throws InvalidArgument with the reason if they cannot be
  // listed.
  std::vector<std::string> names() const;
  bool has(const std::string& name) const;
  // Like map_file(path() / name), but within the folder that was opened.
  MappedFile map(const std::string& name) const;
  // True if path() is now another folder or does not exist.
  bool is_replaced() const;

 private:
  std::filesystem::path path_;
  int descriptor_;
};

}  // namespace switchyard
