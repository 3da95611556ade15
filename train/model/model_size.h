// SPDX-License-Identifier: Apache-2.0
// The size of a model, computed from its options before any of it is allocated.
#pragma once

#include <cstdint>

#include "options/config.h"

namespace switchyard::train {

// Counts saturate at the largest std::int64_t.
struct ModelSize {
  std::int64_t parameters = 0;         // the whole model
  std::int64_t active_parameters = 0;  // used by one token
  std::int64_t in_experts = 0;         // the part of `parameters` that ranks divide
  // Bytes of one set of tensors as stored in checkpoints: parameters and score biases.
  std::int64_t bytes = 0;
};
ModelSize size_of(const ModelConfig& config);

}  // namespace switchyard::train
