// A folder that is opened once: what is read is all of it, whatever takes its place meanwhile.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/mapped_file.h"

namespace switchyard {

class OpenFolder {
 public:
  // Follows links. InvalidArgument says why it cannot be opened.
  explicit OpenFolder(std::filesystem::path path);
  ~OpenFolder();
  OpenFolder(const OpenFolder&) = delete;
  OpenFolder& operator=(const OpenFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Ascending; InvalidArgument says why they cannot be listed.
  std::vector<std::string> names() const;
  bool has(const std::string& name) const;
  // As map_file(path() / name).
  MappedFile map(const std::string& name) const;
  // Whether path() is another folder by now, or none.
  bool is_replaced() const;

 private:
  std::filesystem::path path_;
  int descriptor_;
};

}  // namespace switchyard
