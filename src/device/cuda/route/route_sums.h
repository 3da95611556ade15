// SPDX-License-Identifier: Apache-2.0
// The sums over tokens that routing produces, and the problems that it found.
#pragma once

#include <cstdint>
#include <optional>

#include "device/cuda/runtime/context.h"
#include "device/device_backend.h"

namespace switchyard::cuda {

// The value of problem words without a position, while tokens are routed.
constexpr int kNoPositionByte = 0x7f;
constexpr std::int64_t kNoPosition = 0x7f7f7f7f7f7f7f7f;

// Per-token input of the sums.
struct TokenSums {
  TensorView counts;                           // [T] f32: divisor of the scores; 0: in no sum
  std::optional<TensorView> scores = {};       // [T, E] f32
  std::optional<TensorView> log_sum_exp = {};  // [T] f32
};

// Adds the tokens to args.sums, if given, and converts the positions in args.problems to problem
// words. On entry kNonFiniteToken holds the first token, kBadToken the first (token · K + k).
void finish_routing(const RouteTokens& args, const TokenSums& tokens, Context& context);

}  // namespace switchyard::cuda
