// SPDX-License-Identifier: Apache-2.0
// Samples text from a model.
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
  std::function<void(char)> on_byte = {};  // if set, called on every rank for each new byte
};

// Returns the text that follows the prompt, sampled byte by byte, the same on every rank. An empty
// prompt stands for a newline. The model sees only the last config().context bytes. Collective.
std::string sample(Transformer& model, std::string_view prompt, const SampleOptions& options);

// Returns the byte that u in [0, 1) selects by the logits [V], with the probabilities
// softmax(logits / temperature). With temperature 0 returns the likeliest byte, the lowest of
// equals.
std::uint8_t pick_byte(std::span<const float> logits, float temperature, double u);

}  // namespace switchyard::train
