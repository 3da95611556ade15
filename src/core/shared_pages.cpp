// SPDX-License-Identifier: Apache-2.0
#include "core/shared_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "core/last_error.h"
#include "core/require.h"

namespace switchyard {

Descriptor make_shared_file(std::int64_t bytes) {
  Descriptor made(::memfd_create("switchyard", MFD_CLOEXEC));
  require<DeviceError>(made.is_open() && ::ftruncate(made.get(), bytes) == 0,
                       "allocating {} bytes of shared memory: {}", bytes, last_error());
  return made;
}

namespace {

std::int64_t whole_pages(std::int64_t bytes) {
  const std::int64_t page = ::sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

}  // namespace

SharedPages::SharedPages(std::int64_t bytes)
    : SharedPages(make_shared_file(whole_pages(bytes)), bytes) {}

SharedPages::SharedPages(Descriptor file, std::int64_t bytes) : file_(std::move(file)) {
  const auto size = static_cast<std::size_t>(whole_pages(bytes));
  void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  require<DeviceError>(mapped != MAP_FAILED, "mapping shared memory: {}", last_error());
  bytes_ = {static_cast<std::byte*>(mapped), size};
}

SharedPages::~SharedPages() { ::munmap(bytes_.data(), bytes_.size()); }

}  // namespace switchyard
