// SPDX-License-Identifier: Apache-2.0
// What the emulated driver writes into a CUtensorMap.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace emulation {

struct TensorMap {
  std::byte* data;
  std::uint64_t extents[4];
  std::uint64_t strides[3];  // in bytes, of all dimensions but the first
  std::uint32_t box[4];
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline const TensorMap& decode(const CUtensorMap& map) {
  return reinterpret_cast<const TensorMap&>(map);
}

}  // namespace emulation
