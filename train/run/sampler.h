// Text from a model.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "model/transformer.h"

namespace switchyard::train {

struct SampleOptions {
  std::int64_t bytes = 400;
  float temperature = 0.7F;  // 0: always the likeliest byte
  std::uint64_t seed = 1;
  std::function<void(char)> on_byte = {};  // if given, called on every rank as each is known
};

// Collective; the same text on every rank. What follows the prompt, byte by byte; an empty prompt
// stands for a newline. Only the last config().context bytes are seen.
std::string sample(Transformer& model, std::string_view prompt, const SampleOptions& options);

// The byte that a number u in [0, 1) picks by logits [V]: the probabilities are those of
// logits / temperature. 0: the likeliest, the lowest of equals.
std::uint8_t pick_byte(std::span<const float> logits, float temperature, double u);

}  // namespace switchyard::train
