// The sums over tokens that routing leaves behind, and what it met.
#pragma once

#include <cstdint>
#include <optional>

#include "device/cuda/runtime/context.h"
#include "device/device_backend.h"

namespace switchyard::cuda {

// While tokens are routed: words of problems hold no position yet where they are this.
constexpr int kNoPositionByte = 0x7f;
constexpr std::int64_t kNoPosition = 0x7f7f7f7f7f7f7f7f;

// What the sums need of every token.
struct TokenSums {
  TensorView counts;                      // [T] f32: 0: in no sum; otherwise what scores are over
  std::optional<TensorView> scores = {};  // [T, E] f32
  std::optional<TensorView> log_sum_exp = {};  // [T] f32
};

// Adds the tokens to args.sums, if there are any, and writes the words of args.problems from the
// positions: the first token in kNonFiniteToken, the first (token · K + k) in kBadToken.
void finish_routing(const RouteTokens& args, const TokenSums& tokens, Context& context);

}  // namespace switchyard::cuda
