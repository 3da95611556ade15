// Losses are computed from whole numbers alone, so that they have the same bits on every rank and
// at every number of ranks.
#include "moe/losses.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "moe/sum_integers.h"

namespace switchyard {
namespace {

using Whole = std::int64_t;

double value_of(Whole whole, Whole fractions) {
  return static_cast<double>(whole) + static_cast<double>(fractions) * RouterSums::kUnit;
}

// What E · Σ f_e · P_e has in front of picks · scores.
double balance_factor(std::size_t num_experts, Whole num_tokens, Whole top_k) {
  const auto tokens = static_cast<double>(num_tokens);
  return num_tokens == 0
             ? 0.0
             : static_cast<double>(num_experts) / (tokens * tokens * static_cast<double>(top_k));
}

double balance_loss(std::span<const Whole> picks, std::span<const Whole> scores, Whole num_tokens,
                    Whole top_k) {
  double sum = 0.0;
  for (std::size_t e = 0; e < picks.size(); ++e) {
    sum += static_cast<double>(picks[e]) * value_of(0, scores[e]);
  }
  return sum * balance_factor(picks.size(), num_tokens, top_k);
}

void fill_slopes(std::span<const Whole> picks, double factor, const TensorView& row) {
  const auto slopes = row.span<float>();
  for (std::size_t e = 0; e < picks.size(); ++e) {
    slopes[e] = static_cast<float>(static_cast<double>(picks[e]) * factor);
  }
}

// Adds the totals of all ranks of `comm` up.
void sum_over(Communicator& comm, BatchTotals& t) {
  const auto one = [](Whole& number) { return std::span(&number, 1); };
  sum_integers(comm, {t.picks, t.scores, one(t.num_tokens), one(t.squares), one(t.square_fractions),
                      one(t.num_sequences), one(t.sequence_losses), one(t.loss_fractions)});
}

}  // namespace

LossTerms::LossTerms(RouterSums sums, std::int64_t top_k, Communicator* sequence,
                     Communicator* batch)
    : sums_(std::move(sums)), top_k_(top_k) {
  totals_.picks = sums_.all_picks();
  totals_.scores = sums_.all_scores();
  totals_.num_tokens = sums_.all_tokens();
  totals_.squares = sums_.squares.span<Whole>()[0];
  totals_.square_fractions = sums_.squares.span<Whole>()[1];
  const bool by_sequence = sums_.losses.balance == BalanceLoss::sequence;
  if (by_sequence && sequence != nullptr) sequence->all_reduce(sums_.by_sequence);
  // Ranks that share sequences have the same losses of them: one of them counts.
  const bool counts = batch == nullptr || sequence == nullptr || sequence->rank() == 0;
  if (by_sequence && counts) count_sequences();
  if (batch != nullptr) sum_over(*batch, totals_);
}

void LossTerms::count_sequences() {
  for (Whole s = 0; s < sums_.num_sequences(); ++s) {
    if (sums_.num_tokens(s) == 0) continue;
    const double loss = balance_loss(sums_.picks(s), sums_.scores(s), sums_.num_tokens(s), top_k_);
    ++totals_.num_sequences;
    totals_.sequence_losses += static_cast<Whole>(std::floor(loss));
    totals_.loss_fractions += static_cast<Whole>((loss - std::floor(loss)) / RouterSums::kUnit);
  }
}

RouterLosses LossTerms::values() const {
  RouterLosses losses;
  if (sums_.losses.balance == BalanceLoss::batch) {
    losses.balance =
        static_cast<float>(balance_loss(totals_.picks, totals_.scores, totals_.num_tokens, top_k_));
  } else if (totals_.num_sequences > 0) {
    losses.balance = static_cast<float>(value_of(totals_.sequence_losses, totals_.loss_fractions) /
                                        static_cast<double>(totals_.num_sequences));
  }
  if (totals_.num_tokens > 0) {
    losses.z = static_cast<float>(value_of(totals_.squares, totals_.square_fractions) /
                                  static_cast<double>(totals_.num_tokens));
  }
  return losses;
}

RouterSlopes LossTerms::slopes(const RouterLosses& d_losses) const {
  RouterSlopes slopes{.scores = sums_.losses.scores, .sequence_tokens = sums_.sequence_tokens};
  const auto experts = totals_.picks.size();
  if (sums_.losses.balance != BalanceLoss::none && d_losses.balance != 0.0F) {
    slopes.by_score = Tensor({sums_.num_sequences(), sums_.num_experts}, Dtype::f32);
    for (Whole s = 0; s < sums_.num_sequences(); ++s) {
      const TensorView row = slopes.by_score.view().slice(s, s + 1);
      if (sums_.losses.balance == BalanceLoss::batch) {
        fill_slopes(totals_.picks,
                    d_losses.balance * balance_factor(experts, totals_.num_tokens, top_k_), row);
      } else {
        const auto sequences = static_cast<double>(std::max<Whole>(totals_.num_sequences, 1));
        fill_slopes(
            sums_.picks(s),
            d_losses.balance / sequences * balance_factor(experts, sums_.num_tokens(s), top_k_),
            row);
      }
    }
  }
  if (sums_.losses.z && totals_.num_tokens > 0) {
    slopes.by_square = static_cast<float>(d_losses.z / static_cast<double>(totals_.num_tokens));
  }
  return slopes;
}

}  // namespace switchyard
