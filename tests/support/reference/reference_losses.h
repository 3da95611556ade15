// SPDX-License-Identifier: Apache-2.0
// A router's losses, written as their formulas, in double precision.
#pragma once

#include <cstdint>
#include <vector>

#include "support/reference/moe_reference.h"
#include "switchyard/losses.h"

namespace switchyard::testing {

struct ReferenceLosses {
  double balance = 0.0;
  double z = 0.0;
};

// x holds consecutive sequences of `sequence_tokens` tokens. The choice of experts is given.
ReferenceLosses reference_losses(const RouterOptions& options, const LossOptions& losses,
                                 const ReferenceRouter& router, const Doubles& x,
                                 const std::vector<std::int32_t>& expert_ids,
                                 std::int64_t sequence_tokens);

}  // namespace switchyard::testing
