// SPDX-License-Identifier: Apache-2.0
// The function that libFuzzer calls. The replay of the corpus calls it, too.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "switchyard/error.h"
#include "switchyard/tensor.h"

// Reads an input as a file would be read. What ends the process or escapes is a finding.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

// Changes an input in place and returns its new size. libFuzzer, or the replay, gives the second; a
// target may have the first, which makes use of it.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed);
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace switchyard::fuzz {

inline void check(bool ok) {
  if (!ok) std::abort();
}

// A file in memory, with a path: on a disk, writing would take most of the time.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("fuzz", 0)) { check(descriptor_ >= 0); }

  void write(const std::uint8_t* data, std::size_t size) const {
    const auto length = static_cast<off_t>(size);
    check(::ftruncate(descriptor_, length) == 0);
    check(::pwrite(descriptor_, data, size, 0) == length);
  }
  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

// None if it is refused as it should be; once opened, nothing may go wrong any more.
template <typename File>
std::optional<File> open(const std::filesystem::path& path) {
  try {
    return File::open(path);
  } catch (const InvalidArgument&) {
    return std::nullopt;
  }
}

// Reads every byte.
inline void touch(const ConstTensorView& view) {
  volatile std::byte sink{};
  for (std::int64_t i = 0; i < view.bytes(); ++i) sink = view.data()[i];
  (void)sink;
}

}  // namespace switchyard::fuzz
