// SPDX-License-Identifier: Apache-2.0
#include "common/sum_over_ranks.h"

#include <bit>
#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::train {

std::vector<double> sum_over_ranks(Communicator& comm, std::span<const double> values) {
  const auto n = static_cast<std::int64_t>(values.size());
  Tensor own({n}, Dtype::i64);
  Tensor all({comm.size() * n}, Dtype::i64);
  for (std::size_t i = 0; i < values.size(); ++i) {
    own.span<std::int64_t>()[i] = std::bit_cast<std::int64_t>(values[i]);
  }
  comm.all_gather(own, all);
  std::vector<double> sums(values.size());
  for (std::size_t r = 0; r < static_cast<std::size_t>(comm.size()); ++r) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] += std::bit_cast<double>(all.span<std::int64_t>()[r * sums.size() + i]);
    }
  }
  return sums;
}

}  // namespace switchyard::train
