// What a router's losses and statistics are made of, and the slopes that lead back.
#pragma once

#include <cstdint>
#include <optional>

#include "switchyard/losses.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Sums over tokens in whole numbers: the same bits in whatever order tokens, threads and ranks add
// to them. In the memory of the device that routes.
struct RouterSums {
  static constexpr double kUnit = 0x1p-32;
  // More than any router that still learns has; keeps the sums of 2²² tokens within 64 bits.
  static constexpr double kMostSquare = 0x1p40;

  LossOptions losses;
  std::int64_t num_experts = 0;
  std::int64_t sequence_tokens = 1;  // of x in each sequence, one sequence after the other
  // A row a sequence: picks of every expert, Σ of its scores in units of 2⁻³², tokens. Scores are
  // left out where no loss needs them, as squares are.
  TensorView by_sequence;  // [S, 2E + 1] i64
  // Σ logsumexp(logits)²: whole parts, and what is behind the point in units of 2⁻³².
  TensorView squares;  // [2] i64

  std::int64_t num_sequences() const { return by_sequence.rows(); }
  bool wants_scores() const { return losses.balance != BalanceLoss::none; }
  bool wants_squares() const { return losses.z; }
};

// What the slopes of a batch's balance loss are made of: picks of every expert, tokens, and
// sequences that have tokens, over whatever the losses are over.
constexpr std::int64_t loss_total_words(std::int64_t num_experts) { return num_experts + 2; }

// What E · Σ f_e · P_e has in front of picks · scores, over so many tokens.
constexpr double balance_factor(std::int64_t num_experts, std::int64_t num_tokens,
                                std::int64_t top_k) {
  const auto tokens = static_cast<double>(num_tokens);
  return num_tokens == 0
             ? 0.0
             : static_cast<double>(num_experts) / (tokens * tokens * static_cast<double>(top_k));
}

// What one unit of a token's score, or of its logsumexp², adds to the loss. In the memory of the
// device that routes.
struct RouterSlopes {
  LossScores scores = LossScores::as_routed;
  std::int64_t sequence_tokens = 1;
  std::optional<TensorView> by_score = {};   // [S, E] f32; none: no balance loss
  std::optional<TensorView> by_square = {};  // [1] f32; none: no z-loss

  bool is_zero() const { return !by_score && !by_square; }
};

}  // namespace switchyard
