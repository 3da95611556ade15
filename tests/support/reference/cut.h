// Cuts a global sequence over ranks.
#pragma once

#include <cstdint>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

// Tokens first … last − 1 of the global sequence are this rank's.
struct Piece {
  std::int64_t first = 0;
  std::int64_t last = 0;

  ConstTensorView of(const Tensor& whole) const { return whole.view().slice(first, last); }
};

// Awkward numbers first (one of them is 0), the rest for the last rank; for up to 8 ranks.
Piece awkward_piece(const Communicator& comm, std::int64_t num_tokens);

// A contiguous copy.
Tensor copy_of(const ConstTensorView& view);

// Whether it is so on every rank: collective.
bool on_all(Communicator& comm, bool here);

}  // namespace switchyard::testing
