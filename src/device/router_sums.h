// SPDX-License-Identifier: Apache-2.0
// The sums behind a router's losses and statistics, and the slopes for their gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "switchyard/losses.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Integer sums over tokens, so that the bits do not depend on the order in which tokens, threads
// and ranks add to them. They are in the memory of the device that routes.
struct RouterSums {
  static constexpr double kUnit = 0x1p-32;
  // The cap on logsumexp²: more than any useful router reaches, and small enough that the sum over
  // 2²² tokens fits in 64 bits.
  static constexpr double kMostSquare = 0x1p40;

  LossOptions losses;
  std::int64_t num_experts = 0;
  std::int64_t sequence_tokens = 1;  // tokens per sequence; sequences are consecutive in x
  // One row per sequence: the picks of each expert, the sums of its scores in units of 2⁻³², and
  // the number of tokens. Scores, like squares, stay 0 if no loss needs them.
  TensorView by_sequence;  // [S, 2E + 1] i64
  // Σ logsumexp(logits)²: the integer parts, and the fractional parts in units of 2⁻³².
  TensorView squares;  // [2] i64

  std::int64_t num_sequences() const { return by_sequence.rows(); }
  bool wants_scores() const { return losses.balance != BalanceLoss::none; }
  bool wants_squares() const { return losses.z; }
};

// [loss_total_words(E)] i64: the sums that the losses are computed from. Tables of several ranks
// are added word by word. A table begins like a row of by_sequence: picks [E], scores [E] in units
// of 2⁻³², tokens.
constexpr std::int64_t picks_word(std::int64_t /*num_experts*/) { return 0; }
constexpr std::int64_t scores_word(std::int64_t num_experts) { return num_experts; }
constexpr std::int64_t tokens_word(std::int64_t num_experts) { return 2 * num_experts; }
// The two words of squares come next.
constexpr std::int64_t squares_word(std::int64_t num_experts) { return 2 * num_experts + 1; }
constexpr std::int64_t square_fractions_word(std::int64_t num_experts) {
  return 2 * num_experts + 2;
}
// The last words are the number of sequences that have tokens and, for losses by sequence, the sum
// of their losses: the integer parts, and the fractional parts in units of 2⁻³².
constexpr std::int64_t sequences_word(std::int64_t num_experts) { return 2 * num_experts + 3; }
constexpr std::int64_t sequence_losses_word(std::int64_t num_experts) {
  return 2 * num_experts + 4;
}
constexpr std::int64_t loss_fractions_word(std::int64_t num_experts) { return 2 * num_experts + 5; }
constexpr std::int64_t loss_total_words(std::int64_t num_experts) { return 2 * num_experts + 6; }

// Returns the factor that turns Σ picks · scores over this many tokens into E · Σ f_e · P_e.
constexpr double balance_factor(std::int64_t num_experts, std::int64_t num_tokens,
                                std::int64_t top_k) {
  const auto tokens = static_cast<double>(num_tokens);
  return num_tokens == 0
             ? 0.0
             : static_cast<double>(num_experts) / (tokens * tokens * static_cast<double>(top_k));
}

// Returns E · Σ f_e · P_e. Adds experts in order and rounds products and sums separately.
inline double balance_loss(std::span<const std::int64_t> picks,
                           std::span<const std::int64_t> scores, std::int64_t num_tokens,
                           std::int64_t top_k) {
  double sum = 0.0;
  for (std::size_t e = 0; e < picks.size(); ++e) {
    const double score = static_cast<double>(scores[e]) * RouterSums::kUnit;
    sum += static_cast<double>(picks[e]) * score;
  }
  return sum * balance_factor(static_cast<std::int64_t>(picks.size()), num_tokens, top_k);
}

// The derivatives of the loss with respect to a token's scores and its logsumexp². They are in the
// memory of the device that routes.
struct RouterSlopes {
  LossScores scores = LossScores::as_routed;
  std::int64_t sequence_tokens = 1;
  std::optional<TensorView> by_score = {};   // [S, E] f32; empty without a balance loss
  std::optional<TensorView> by_square = {};  // [1] f32; empty without a z-loss

  bool is_zero() const { return !by_score && !by_square; }
};

}  // namespace switchyard
