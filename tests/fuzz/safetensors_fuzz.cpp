// SPDX-License-Identifier: Apache-2.0
// Opens bytes as a safetensors file and reads every tensor that it has.
#include <cstring>

#include "fuzz_target.h"
#include "safetensors_mutator.h"
#include "switchyard/safetensors.h"

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
    std::memcpy(&length, data, switchyard::fuzz::kLengthBytes);
    switchyard::read_all(*file, size - switchyard::fuzz::kLengthBytes - length);
  }
  return 0;
}
