// SPDX-License-Identifier: Apache-2.0
#include "comm/sum_integers.h"

#include <algorithm>

namespace switchyard {

void sum_integers(Communicator& comm, std::initializer_list<std::span<std::int64_t>> numbers) {
  if (comm.size() == 1) return;
  std::size_t count = 0;
  for (const auto part : numbers) count += part.size();
  Tensor all({static_cast<std::int64_t>(count)}, Dtype::i64);
  auto at = all.span<std::int64_t>().begin();
  for (const auto part : numbers) at = std::ranges::copy(part, at).out;
  comm.all_reduce(all);
  at = all.span<std::int64_t>().begin();
  for (const auto part : numbers) {
    std::copy_n(at, part.size(), part.begin());
    at += static_cast<std::ptrdiff_t>(part.size());
  }
}

}  // namespace switchyard
