// SPDX-License-Identifier: Apache-2.0
#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/last_error.h"
#include "core/require.h"

namespace switchyard {
namespace {

constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

// Opens `file` again. Returns null if that fails or if the name now refers to a different file.
std::shared_ptr<const Descriptor> opened_again(const MappedFile& mapping, const std::string& file) {
  auto descriptor = std::make_shared<const Descriptor>(::open(file.c_str(), kReadFlags));
  struct stat status = {};
  const bool is_same = descriptor->is_open() && ::fstat(descriptor->get(), &status) == 0 &&
                       status.st_dev == mapping.device && status.st_ino == mapping.inode;
  return is_same ? descriptor : nullptr;
}

}  // namespace

MappedFile map_file(const std::string& file) { return map_file_in(AT_FDCWD, file, file); }

MappedFile map_file_in(int folder, const std::string& name, const std::string& file) {
  // kReadFlags has O_NONBLOCK: otherwise opening a pipe would block until it has a writer.
  auto descriptor = std::make_shared<const Descriptor>(::openat(folder, name.c_str(), kReadFlags));
  require(descriptor->is_open(), "cannot open {}: {}", file, last_error());
  struct stat status = {};
  require(::fstat(descriptor->get(), &status) == 0 && S_ISREG(status.st_mode),
          "{} is not a regular file", file);
  const std::int64_t bytes = status.st_size;
  if (bytes == 0) return {};
  const auto count = static_cast<std::size_t>(bytes);
  void* address = ::mmap(nullptr, count, PROT_READ, MAP_PRIVATE, descriptor->get(), 0);
  require(address != MAP_FAILED, "cannot map the {} bytes of {}: {}", bytes, file, last_error());
  return {{static_cast<const std::byte*>(address),
           [address, count](auto*) { ::munmap(address, count); }},
          bytes,
          status.st_dev,
          status.st_ino,
          std::move(descriptor)};
}

FileReader::FileReader(MappedFile mapping, std::string file)
    : mapping_(std::move(mapping)), file_(std::move(file)) {
  if (mapping_.descriptor == nullptr) mapping_.descriptor = opened_again(mapping_, file_);
}

void FileReader::read(std::int64_t offset, std::span<std::byte> into) const {
  if (mapping_.descriptor == nullptr) {
    if (!into.empty()) std::memcpy(into.data(), mapping_.data.get() + offset, into.size());
    return;
  }
  constexpr std::size_t kMostReadAtOnce = std::size_t{1} << 30;  // per system call
  while (!into.empty()) {
    const auto count = std::min(into.size(), kMostReadAtOnce);
    const auto n = ::pread(mapping_.descriptor->get(), into.data(), count, offset);
    if (n < 0 && errno == EINTR) continue;
    require<StorageError>(n >= 0, "cannot read {} bytes at {} of {}: {}", into.size(), offset,
                          file_, last_error());
    require<StorageError>(n > 0,
                          "{} was truncated while it was being read: of its {} bytes, {} are left",
                          file_, mapping_.bytes, offset);
    into = into.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
}

void FileReader::read_ahead(std::int64_t offset, std::int64_t bytes) const {
  if (mapping_.descriptor == nullptr) return;
  ::posix_fadvise(mapping_.descriptor->get(), offset, bytes, POSIX_FADV_WILLNEED);
}

}  // namespace switchyard
