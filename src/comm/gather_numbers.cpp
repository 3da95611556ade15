// SPDX-License-Identifier: Apache-2.0
#include "comm/gather_numbers.h"

#include <algorithm>

#include "comm/failure_listener.h"
#include "core/hash.h"
#include "core/require.h"

namespace switchyard {

Tensor gather_numbers(Communicator& comm, std::span<const std::int64_t> own) {
  const auto n = own.size();
  Tensor sent({1, static_cast<std::int64_t>(n) + 1}, Dtype::i64);
  std::ranges::copy(own, sent.span<std::int64_t>().begin());
  sent.span<std::int64_t>()[n] = hash_of(own);
  Tensor received(sent.shape().with_rows(comm.size()), Dtype::i64);
  comm.all_gather(sent, received);

  Tensor all({comm.size(), static_cast<std::int64_t>(n)}, Dtype::i64);
  for (int r = 0; r < comm.size(); ++r) {
    const auto row = received.view().slice(r, r + 1).span<std::int64_t>();
    const std::span<const std::int64_t> numbers = row.first(n);
    if (hash_of(numbers) != row[n]) {
      FailureListeners::fail(
          comm,
          fmt::format("{} numbers of rank {} arrived damaged at rank {}: their checksum is "
                      "{:016x}, but was sent as {:016x}",
                      n, r, comm.rank(), static_cast<std::uint64_t>(hash_of(numbers)),
                      static_cast<std::uint64_t>(row[n])),
          {r});
    }
    std::ranges::copy(numbers, all.view().slice(r, r + 1).span<std::int64_t>().begin());
  }
  return all;
}

}  // namespace switchyard
