// SPDX-License-Identifier: Apache-2.0
// Routings for benchmarks.
#pragma once

#include <cstdint>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

enum class RoutingKind {
  balanced,    // (t·K + k) mod E: every expert gets the same number of picks
  uniform,     // K distinct experts, drawn uniformly
  zipf,        // K distinct experts, drawn with weights 1, 1/2, 1/3, … in shuffled order
  one_expert,  // the first pick is always expert 0, the others are drawn uniformly
  router,      // the picks of a router with random weights; only for layers
};

struct RoutingOptions {
  RoutingKind kind = RoutingKind::uniform;
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 1;
  int num_experts = 1;
  std::uint64_t seed = 1;
};

// Returns the routing of all ranks' tokens, [T, K] i32.
Tensor make_routing(const RoutingOptions& options);
// Returns this rank's slice of make_routing().
Tensor make_local_routing(const Communicator& comm, const RoutingOptions& options);

}  // namespace switchyard::cli
