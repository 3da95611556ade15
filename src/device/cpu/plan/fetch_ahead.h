// SPDX-License-Identifier: Apache-2.0
// Prefetches tables before they are written.
#pragma once

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::cpu {

// Prefetches memory that will soon be written in random order. The rows of the last step have
// evicted it from the caches, and fetching it all at once is faster than one miss after another.
inline void fetch_ahead(const TensorView& table) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t i = 0; i < table.bytes(); i += kLine) __builtin_prefetch(table.data() + i, 1);
}

}  // namespace switchyard::cpu
