// Routings for benchmarks.
#pragma once

#include <cstdint>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

enum class RoutingKind {
  balanced,    // (t·K + k) mod E: every expert gets the same number
  uniform,     // K distinct experts, drawn evenly
  zipf,        // K distinct experts, drawn by 1/rank over shuffled experts
  one_expert,  // the first pick is always expert 0, the others are drawn evenly
  router,      // what a router of random weights picks; only where there is one
};

struct RoutingOptions {
  RoutingKind kind = RoutingKind::uniform;
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 1;
  int num_experts = 1;
  std::uint64_t seed = 1;
};

// [T, K] i32, the whole sequence; a rank takes its slice.
Tensor make_routing(const RoutingOptions& options);
// This rank's part of it.
Tensor make_local_routing(const Communicator& comm, const RoutingOptions& options);

}  // namespace switchyard::cli
