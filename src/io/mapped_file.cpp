#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/require.h"

namespace switchyard {
namespace {

struct DescriptorCloser {
  int descriptor;
  ~DescriptorCloser() { ::close(descriptor); }
};

std::string last_error() { return std::generic_category().message(errno); }

}  // namespace

MappedFile map_file(const std::string& file) { return map_file_in(AT_FDCWD, file, file); }

MappedFile map_file_in(int folder, const std::string& name, const std::string& file) {
  // Without O_NONBLOCK, opening a pipe would wait for someone to write.
  const int descriptor = ::openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(descriptor >= 0, "cannot open {}: {}", file, last_error());
  const DescriptorCloser closer{descriptor};
  struct stat status = {};
  require(::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode), "{} is not a regular file",
          file);
  const std::int64_t bytes = status.st_size;
  if (bytes == 0) return {};
  const auto count = static_cast<std::size_t>(bytes);
  void* address = ::mmap(nullptr, count, PROT_READ, MAP_PRIVATE, descriptor, 0);
  require(address != MAP_FAILED, "cannot map the {} bytes of {}: {}", bytes, file, last_error());
  return {{static_cast<const std::byte*>(address),
           [address, count](auto*) { ::munmap(address, count); }},
          bytes};
}

}  // namespace switchyard
