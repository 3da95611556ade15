// Opens bytes as a safetensors file and reads every tensor that it has.
#include <algorithm>
#include <cstring>
#include <string>

#include "fuzz_target.h"
#include "switchyard/safetensors.h"

namespace {

constexpr std::size_t kLengthBytes = 8;

}  // namespace

namespace switchyard {
namespace {

// Reading beyond the file is no fault within its last page, so that bytes are counted, too.
void read_all(const SafetensorsFile& file, std::uint64_t data_bytes) {
  const auto tensors = file.tensors();
  std::uint64_t bytes = 0;
  for (const auto& name : file.names()) {
    const auto info = file.info(name);
    fuzz::check(info.is_readable == tensors.contains(name));
    if (info.is_readable) {
      fuzz::check(tensors.at(name).bytes() == info.bytes);
      fuzz::touch(file.tensor(name));
    }
    bytes += static_cast<std::uint64_t>(info.bytes);
  }
  fuzz::check(bytes == data_bytes);
}

}  // namespace
}  // namespace switchyard

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const switchyard::fuzz::MemoryFile kFile;
  kFile.write(data, size);
  if (const auto file = switchyard::fuzz::open<switchyard::SafetensorsFile>(kFile.path())) {
    std::uint64_t length = 0;
    std::memcpy(&length, data, kLengthBytes);
    switchyard::read_all(*file, size - kLengthBytes - length);
  }
  return 0;
}

// Half of the time only the header changes, and its length with it: otherwise hardly a change of
// more than a byte would get past the length.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
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
