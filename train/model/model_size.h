// How large a model is, known from its options before any of it is made.
#pragma once

#include <cstdint>

#include "options/config.h"

namespace switchyard::train {

// Those beyond the largest number are the largest number.
struct ModelSize {
  std::int64_t parameters = 0;         // of the whole model
  std::int64_t active_parameters = 0;  // that one token uses
  std::int64_t in_experts = 0;         // of the parameters, those that ranks divide
  // Of one set of tensors as checkpoints hold it: parameters, and the biases of the choice.
  std::int64_t bytes = 0;
};
ModelSize size_of(const ModelConfig& config);

}  // namespace switchyard::train
