// What a router's losses and statistics are made of, and the slopes that lead back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

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

// [loss_total_words(E)] i64: what the losses of a batch are made of, over whatever they are over.
// Tables of several ranks add up word by word. It begins as a row of by_sequence does: picks [E],
// scores [E] in units of 2⁻³², tokens.
constexpr std::int64_t picks_word(std::int64_t /*num_experts*/) { return 0; }
constexpr std::int64_t scores_word(std::int64_t num_experts) { return num_experts; }
constexpr std::int64_t tokens_word(std::int64_t num_experts) { return 2 * num_experts; }
// Then the two words of squares.
constexpr std::int64_t squares_word(std::int64_t num_experts) { return 2 * num_experts + 1; }
constexpr std::int64_t square_fractions_word(std::int64_t num_experts) {
  return 2 * num_experts + 2;
}
// Then how many sequences have tokens, and where losses are by sequence, Σ of their losses: whole
// parts, and what is behind the point in units of 2⁻³².
constexpr std::int64_t sequences_word(std::int64_t num_experts) { return 2 * num_experts + 3; }
constexpr std::int64_t sequence_losses_word(std::int64_t num_experts) {
  return 2 * num_experts + 4;
}
constexpr std::int64_t loss_fractions_word(std::int64_t num_experts) { return 2 * num_experts + 5; }
constexpr std::int64_t loss_total_words(std::int64_t num_experts) { return 2 * num_experts + 6; }

// What E · Σ f_e · P_e has in front of picks · scores, over so many tokens.
constexpr double balance_factor(std::int64_t num_experts, std::int64_t num_tokens,
                                std::int64_t top_k) {
  const auto tokens = static_cast<double>(num_tokens);
  return num_tokens == 0
             ? 0.0
             : static_cast<double>(num_experts) / (tokens * tokens * static_cast<double>(top_k));
}

// E · Σ f_e · P_e: experts in order, products and sums rounded apart.
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
