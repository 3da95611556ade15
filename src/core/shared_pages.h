// Pages of the host's memory that processes may share: a file without a name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/descriptor.h"

namespace switchyard {

// A file of zeros without a name, in memory. Throws DeviceError.
Descriptor make_shared_file(std::int64_t bytes);

class SharedPages {
 public:
  // Makes new pages of zeros.
  explicit SharedPages(std::int64_t bytes);
  // Maps the pages behind a file that another process sent.
  SharedPages(Descriptor file, std::int64_t bytes);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  const Descriptor& file() const { return file_; }
  // Closes the descriptor when all who map the pages have them.
  void close_file() { file_ = Descriptor(); }

 private:
  Descriptor file_;
  std::span<std::byte> bytes_;
};

}  // namespace switchyard
