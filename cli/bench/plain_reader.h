// Reads a file as plainly as can be: what loading is measured against.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "switchyard/error.h"

namespace switchyard::cli {

// Bytes of a file that go to one place in memory.
struct FileRange {
  std::int64_t offset = 0;
  std::byte* into = nullptr;
  std::int64_t bytes = 0;
};

class PlainReader {
 public:
  explicit PlainReader(const std::filesystem::path& path)
      : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) throw InternalError(fmt::format("cannot open {}", path.string()));
  }
  ~PlainReader() { ::close(descriptor_); }
  PlainReader(const PlainReader&) = delete;
  PlainReader& operator=(const PlainReader&) = delete;

  void read(const FileRange& range) const {
    constexpr std::int64_t kPiece = 1 << 20;
    for (std::int64_t done = 0; done < range.bytes;) {
      const auto count = static_cast<std::size_t>(std::min(kPiece, range.bytes - done));
      const auto got = ::pread(descriptor_, range.into + done, count, range.offset + done);
      if (got <= 0) throw InternalError("a read for the ceiling failed");
      done += got;
    }
  }

 private:
  int descriptor_;
};

}  // namespace switchyard::cli
