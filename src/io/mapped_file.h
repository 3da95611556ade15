// SPDX-License-Identifier: Apache-2.0
// Read-only mappings of files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/descriptor.h"

namespace switchyard {

// If the file is truncated later, touching the lost part of the mapping kills the process (SIGBUS).
// Use a FileReader wherever the bytes can be copied instead.
struct MappedFile {
  std::shared_ptr<const std::byte> data;  // null if the file is empty
  std::int64_t bytes = 0;
  // The device and inode identify the file even if its name now refers to another one.
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::shared_ptr<const Descriptor> descriptor = {};  // open, or null
};

// Maps a regular file. Throws InvalidArgument with the reason if it cannot be opened or mapped.
MappedFile map_file(const std::string& file);
// Maps the file `name` in the folder that is open as descriptor `folder`. Messages call it `file`.
MappedFile map_file_in(int folder, const std::string& name, const std::string& file);

// Reads bytes of a mapped file through its descriptor, or by opening `file` again if the mapping
// has none. If `file` is now missing or another file, copies from the mapping instead: a file that
// has lost its name is unlikely to be truncated.
class FileReader {
 public:
  FileReader(MappedFile mapping, std::string file);

  // Throws a StorageError that names the file if it was truncated since it was mapped or cannot be
  // read.
  void read(std::int64_t offset, std::span<std::byte> into) const;
  // Asks the system to start reading these bytes from the disk. Does not wait.
  void read_ahead(std::int64_t offset, std::int64_t bytes) const;

 private:
  MappedFile mapping_;
  std::string file_;
};

}  // namespace switchyard
