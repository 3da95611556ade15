// SPDX-License-Identifier: Apache-2.0
// The buffer sizes that ranks on GPUs need for a routing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "between_ranks.h"
#include "switchyard/communicator.h"
#include "switchyard/plan.h"
#include "switchyard/sizing.h"

namespace switchyard::cli {

struct GpuLoad {
  std::int64_t capacity = 0;         // an eighth more rows than the fullest rank needs
  std::int64_t token_capacity = 0;   // an eighth more tokens than any rank receives
  std::int64_t distinct_tokens = 0;  // over all pairs of ranks

  Sizing sizing() const { return Sizing::bounded(capacity, Overflow::fail, token_capacity); }
};

// Collective.
inline GpuLoad load_of(Communicator& comm, const Plan& plan) {
  const auto rows = reduce_number(comm, plan.num_rows(), ReduceOp::max);
  GpuLoad load{.capacity = rows + rows / 8};
  for (int to = 0; to < comm.size(); ++to) {
    std::int64_t received = 0;
    for (int from = 0; from < comm.size(); ++from) received += plan.distinct_tokens(from, to);
    load.distinct_tokens += received;
    load.token_capacity = std::max(load.token_capacity, received + received / 8);
  }
  return load;
}

}  // namespace switchyard::cli
