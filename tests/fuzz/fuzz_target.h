// What libFuzzer calls, and what the replay of the corpus calls in its place.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/safetensors.h"

// Reads an input as a file would be read. Anything but an Error that escapes is a finding.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

// Changes an input in place and returns its new size. libFuzzer, or the replay, gives the second; a
// target may have the first, which makes use of it.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed);
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace switchyard::fuzz {

// Reads every byte.
inline void touch(const ConstTensorView& view) {
  volatile std::byte sink{};
  for (std::int64_t i = 0; i < view.bytes(); ++i) sink = view.data()[i];
  (void)sink;
}

}  // namespace switchyard::fuzz
