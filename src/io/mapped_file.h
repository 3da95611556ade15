// A file's bytes, mapped to be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/descriptor.h"

namespace switchyard {

// Touching what a file lost since is a fault that ends the process (SIGBUS), so that what can be
// copied is read by a FileReader instead.
struct MappedFile {
  std::shared_ptr<const std::byte> data;  // null if there are no bytes
  std::int64_t bytes = 0;
  std::uint64_t device = 0;  // and inode: which file it is, whatever its name leads to by now
  std::uint64_t inode = 0;
  std::shared_ptr<const Descriptor> descriptor = {};  // open, or null
};

// InvalidArgument says why `file` cannot be opened or mapped; only regular files can.
MappedFile map_file(const std::string& file);
// Of a name in a folder that is open as this descriptor; messages call it `file`.
MappedFile map_file_in(int folder, const std::string& name, const std::string& file);

// Reads bytes of a mapped file. Where the mapping has no descriptor and `file` leads to another
// file, or to none, by now, it copies from the mapping: nobody shortens what has no name.
class FileReader {
 public:
  FileReader(MappedFile mapping, std::string file);

  // StorageError names the file if it was shortened since it was mapped, or cannot be read.
  void read(std::int64_t offset, std::span<std::byte> into) const;
  // Begins to read so many bytes from the disk.
  void read_ahead(std::int64_t offset, std::int64_t bytes) const;

 private:
  MappedFile mapping_;
  std::string file_;
};

}  // namespace switchyard
