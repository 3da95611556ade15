// What a router's losses and statistics are made of, and the slopes that lead back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/losses.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Sums over tokens in whole numbers: the same bits in whatever order tokens, threads and ranks add
// to them.
struct RouterSums {
  static constexpr double kUnit = 0x1p-32;

  // Zeros.
  RouterSums(const LossOptions& the_losses, int experts, std::int64_t sequences,
             std::int64_t tokens_of_each)
      : losses(the_losses),
        num_experts(experts),
        sequence_tokens(tokens_of_each),
        by_sequence(Tensor::zeros({sequences, 2 * num_experts + 1}, Dtype::i64)),
        squares(Tensor::zeros({2}, Dtype::i64)) {}

  LossOptions losses;
  std::int64_t num_experts;
  std::int64_t sequence_tokens;  // of x in each sequence, one sequence after the other
  // A row a sequence: picks of every expert, Σ of its scores in units of 2⁻³², tokens. Scores are
  // left out where no loss needs them, as squares are.
  Tensor by_sequence;  // [S, 2E + 1] i64
  // Σ logsumexp(logits)²: whole parts, and what is behind the point in units of 2⁻³².
  Tensor squares;  // [2] i64

  void clear() {
    std::ranges::fill(by_sequence.span<std::int64_t>(), 0);
    std::ranges::fill(squares.span<std::int64_t>(), 0);
  }
  // Over all sequences.
  std::vector<std::int64_t> all_picks() const { return sum_of(&RouterSums::picks); }
  std::vector<std::int64_t> all_scores() const { return sum_of(&RouterSums::scores); }
  std::int64_t all_tokens() const {
    std::int64_t tokens = 0;
    for (std::int64_t s = 0; s < num_sequences(); ++s) tokens += num_tokens(s);
    return tokens;
  }

  std::int64_t num_sequences() const { return by_sequence.rows(); }
  std::span<std::int64_t> row(std::int64_t sequence) {
    return by_sequence.view().slice(sequence, sequence + 1).span<std::int64_t>();
  }
  std::span<const std::int64_t> row(std::int64_t sequence) const {
    return by_sequence.view().slice(sequence, sequence + 1).span<std::int64_t>();
  }
  std::span<const std::int64_t> picks(std::int64_t sequence) const {
    return row(sequence).first(count());
  }
  std::span<const std::int64_t> scores(std::int64_t sequence) const {
    return row(sequence).subspan(count(), count());
  }
  std::int64_t num_tokens(std::int64_t sequence) const { return row(sequence).back(); }

 private:
  std::vector<std::int64_t> sum_of(std::span<const std::int64_t> (RouterSums::*part)(std::int64_t)
                                       const) const {
    std::vector<std::int64_t> sums(count());
    for (std::int64_t s = 0; s < num_sequences(); ++s) {
      const auto values = (this->*part)(s);
      for (std::size_t e = 0; e < sums.size(); ++e) sums[e] += values[e];
    }
    return sums;
  }
  std::size_t count() const { return static_cast<std::size_t>(num_experts); }
};

// What one unit of a token's score, or of its logsumexp², adds to the loss.
struct RouterSlopes {
  LossScores scores = LossScores::as_routed;
  std::int64_t sequence_tokens = 0;
  Tensor by_score = {};  // [S, E] f32, or [0]: no balance loss
  float by_square = 0.0F;

  bool is_zero() const { return by_score.rows() == 0 && by_square == 0.0F; }
};

}  // namespace switchyard
