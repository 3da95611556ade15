// A router's losses as their formulas say them, in double precision.
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

// x holds sequences of so many tokens, one after the other; the choice is given.
ReferenceLosses reference_losses(const RouterOptions& options, const LossOptions& losses,
                                 const ReferenceRouter& router, const Doubles& x,
                                 const std::vector<std::int32_t>& expert_ids,
                                 std::int64_t sequence_tokens);

}  // namespace switchyard::testing
