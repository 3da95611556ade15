// SPDX-License-Identifier: Apache-2.0
// A slow, obvious reference for causal attention with rotary positions: one process, whole
// sequences, double precision.
#pragma once

#include <cstdint>

#include "support/reference/moe_reference.h"

namespace switchyard::testing {

struct AttentionSizes {
  std::int64_t batch = 0;
  std::int64_t length = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 1;
  double rotary_base = 50.0;
};

// Returns y [batch · length, H] without the residual. qkv is [3·H, H], out [H, H].
Doubles reference_attention(const AttentionSizes& sizes, const Doubles& x, const Doubles& qkv,
                            const Doubles& out);

}  // namespace switchyard::testing
