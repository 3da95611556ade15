// SPDX-License-Identifier: Apache-2.0
// Cuts a global sequence over ranks.
#pragma once

#include <cstdint>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

// Tokens first … last − 1 of the global sequence belong to this rank.
struct Piece {
  std::int64_t first = 0;
  std::int64_t last = 0;

  ConstTensorView of(const Tensor& whole) const { return whole.view().slice(first, last); }
};

// Gives the first ranks awkward numbers of tokens (including 0) and the last rank the rest. For up
// to 8 ranks.
Piece awkward_piece(const Communicator& comm, std::int64_t num_tokens);

// Returns a contiguous copy.
Tensor copy_of(const ConstTensorView& view);

// True if `here` is true on every rank. Collective.
bool on_all(Communicator& comm, bool here);

}  // namespace switchyard::testing
