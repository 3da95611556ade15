// SPDX-License-Identifier: Apache-2.0
#include "support/reference/cut.h"

#include <array>
#include <cstring>

namespace switchyard::testing {

Piece awkward_piece(const Communicator& comm, std::int64_t num_tokens) {
  constexpr std::array<std::int64_t, 7> kAwkward{16, 0, 1, 7, 300, 16, 0};
  Piece piece;
  for (int r = 0; r < comm.rank(); ++r) piece.first += kAwkward[static_cast<std::size_t>(r)];
  piece.last = comm.rank() + 1 == comm.size()
                   ? num_tokens
                   : piece.first + kAwkward[static_cast<std::size_t>(comm.rank())];
  return piece;
}

Tensor copy_of(const ConstTensorView& view) {
  Tensor result(view.shape(), view.dtype());
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    std::memcpy(result.view().row(r), view.row(r), static_cast<std::size_t>(view.row_bytes()));
  }
  return result;
}

bool on_all(Communicator& comm, bool here) {
  Tensor verdict = Tensor::from<std::int32_t>({1}, {here ? 1 : 0});
  comm.all_reduce(verdict, ReduceOp::min);
  return verdict.span<std::int32_t>()[0] == 1;
}

}  // namespace switchyard::testing
