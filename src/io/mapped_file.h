// A file's bytes, mapped to be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace switchyard {

struct MappedFile {
  std::shared_ptr<const std::byte> data;  // null if there are no bytes
  std::int64_t bytes = 0;
};

// InvalidArgument says why `file` cannot be opened or mapped; only regular files can.
MappedFile map_file(const std::string& file);
// Of a name in a folder that is open as this descriptor; messages call it `file`.
MappedFile map_file_in(int folder, const std::string& name, const std::string& file);

}  // namespace switchyard
