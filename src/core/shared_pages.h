// SPDX-License-Identifier: Apache-2.0
// Host memory that processes can share, backed by an anonymous file (memfd).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/descriptor.h"

namespace switchyard {

// Creates an anonymous in-memory file of `bytes` zeros. Throws DeviceError on failure.
Descriptor make_shared_file(std::int64_t bytes);

class SharedPages {
 public:
  // Allocates zeroed pages.
  explicit SharedPages(std::int64_t bytes);
  // Maps the pages of a file received from another process.
  SharedPages(Descriptor file, std::int64_t bytes);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  const Descriptor& file() const { return file_; }
  // Closes the descriptor. Call it once every process has mapped the pages.
  void close_file() { file_ = Descriptor(); }

 private:
  Descriptor file_;
  std::span<std::byte> bytes_;
};

}  // namespace switchyard
