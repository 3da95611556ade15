// Fetches tables before they are written.
#pragma once

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::cpu {

// Asks for memory that is soon to be written here and there: after the rows of the last step, none
// of it is in a cache any more, and all of it at once is faster than one miss after the other.
inline void fetch_ahead(const TensorView& table) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t i = 0; i < table.bytes(); i += kLine) __builtin_prefetch(table.data() + i, 1);
}

}  // namespace switchyard::cpu
