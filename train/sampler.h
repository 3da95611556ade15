// Text from a model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transformer.h"

namespace switchyard::train {

struct SampleOptions {
  std::int64_t bytes = 400;
  float temperature = 0.7F;  // 0: always the likeliest byte
  std::uint64_t seed = 1;
};

// Collective; the same text on every rank. What follows the prompt, byte by byte; an empty prompt
// stands for a newline. Only the last context() bytes are seen.
std::string sample(Transformer& model, std::string_view prompt, const SampleOptions& options);

}  // namespace switchyard::train
