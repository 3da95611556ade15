// SPDX-License-Identifier: Apache-2.0
// Forward and backward of swiglu experts with given picks and weights, in double precision.
#pragma once

#include <vector>

#include "support/reference/moe_reference.h"

namespace switchyard::testing {

struct SwigluProblem {
  Doubles x;                                  // [T, H]
  Doubles d_y;                                // [T, H]
  std::vector<std::int32_t> expert_ids = {};  // [T · K]
  Doubles weights;                            // [T, K]
  std::vector<ReferenceExpert> experts = {};
};

struct SwigluResults {
  Doubles y;
  Doubles d_x;
  std::vector<ReferenceExpert> gradients = {};
};

SwigluResults reference_swiglu(const SwigluProblem& problem);

}  // namespace switchyard::testing
