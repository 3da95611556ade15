// Opens bytes as a safetensors file and reads every tensor that it has.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fuzz_target.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// A file in memory, with a path.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("fuzz", 0)) {
    if (descriptor_ < 0) std::abort();
  }

  void write(const std::uint8_t* data, std::size_t size) const {
    const auto length = static_cast<off_t>(size);
    if (::ftruncate(descriptor_, length) != 0 || ::pwrite(descriptor_, data, size, 0) != length) {
      std::abort();
    }
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

void read_all(const SafetensorsFile& file) {
  const auto tensors = file.tensors();
  for (const auto& [name, view] : tensors) fuzz::touch(view);
  for (const auto& name : file.names()) {
    if (file.info(name).is_readable != tensors.contains(name)) std::abort();
    try {
      fuzz::touch(file.tensor(name));
    } catch (const Unsupported&) {
      continue;
    }
  }
}

}  // namespace
}  // namespace switchyard

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const switchyard::MemoryFile kFile;
  kFile.write(data, size);
  try {
    switchyard::read_all(switchyard::SafetensorsFile::open(kFile.path()));
  } catch (const switchyard::InvalidArgument&) {
    return 0;
  }
  return 0;
}

// Half of the time only the header changes, and its length with it: otherwise hardly a change of
// more than a byte would get past the length.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  constexpr std::size_t kLengthBytes = 8;
  std::uint64_t length = 0;
  if (size >= kLengthBytes) std::memcpy(&length, data, kLengthBytes);
  if (seed % 2 == 0 || size < kLengthBytes || length > size - kLengthBytes) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const std::uint8_t* end = data + kLengthBytes + length;
  const std::string behind(reinterpret_cast<const char*>(end), size - kLengthBytes - length);
  length = LLVMFuzzerMutate(data + kLengthBytes, length, max_size - kLengthBytes);
  std::memcpy(data, &length, kLengthBytes);
  const auto kept = std::min(behind.size(), max_size - kLengthBytes - length);
  std::memcpy(data + kLengthBytes + length, behind.data(), kept);
  return kLengthBytes + length + kept;
}
