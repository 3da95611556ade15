#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "core/descriptor.h"
#include "core/last_error.h"
#include "core/require.h"

namespace switchyard {

MappedFile map_file(const std::string& file) { return map_file_in(AT_FDCWD, file, file); }

MappedFile map_file_in(int folder, const std::string& name, const std::string& file) {
  // Without O_NONBLOCK, opening a pipe would wait for someone to write.
  const Descriptor descriptor(::openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  require(descriptor.is_open(), "cannot open {}: {}", file, last_error());
  struct stat status = {};
  require(::fstat(descriptor.get(), &status) == 0 && S_ISREG(status.st_mode),
          "{} is not a regular file", file);
  const std::int64_t bytes = status.st_size;
  if (bytes == 0) return {};
  const auto count = static_cast<std::size_t>(bytes);
  void* address = ::mmap(nullptr, count, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  require(address != MAP_FAILED, "cannot map the {} bytes of {}: {}", bytes, file, last_error());
  return {{static_cast<const std::byte*>(address),
           [address, count](auto*) { ::munmap(address, count); }},
          bytes};
}

}  // namespace switchyard
