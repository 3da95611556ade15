// SPDX-License-Identifier: Apache-2.0
// Changes of safetensors files. Only one source of a program includes this: it defines the mutator.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "fuzz_target.h"

namespace switchyard::fuzz {

constexpr std::size_t kLengthBytes = 8;

}  // namespace switchyard::fuzz

// Half of the time only the header changes, and its length with it: otherwise hardly a change of
// more than a byte would get past the length.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  using switchyard::fuzz::kLengthBytes;
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
