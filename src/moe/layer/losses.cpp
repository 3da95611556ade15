// From a router's sums to its losses, and back to the slopes of its scores. They are computed from
// whole numbers alone, so that they have the same bits on every rank and at every number of ranks.
#include <algorithm>
#include <cmath>
#include <span>

#include "comm/sum_integers.h"
#include "device/device_backend.h"
#include "moe/layer/moe_layer_data.h"

namespace switchyard {
namespace {

using Whole = std::int64_t;

double value_of(Whole whole, Whole fractions) {
  return static_cast<double>(whole) + static_cast<double>(fractions) * RouterSums::kUnit;
}

double balance_loss(std::span<const Whole> picks, std::span<const Whole> scores, Whole num_tokens,
                    Whole top_k) {
  double sum = 0.0;
  for (std::size_t e = 0; e < picks.size(); ++e) {
    sum += static_cast<double>(picks[e]) * value_of(0, scores[e]);
  }
  return sum * balance_factor(static_cast<Whole>(picks.size()), num_tokens, top_k);
}

// A row of by_sequence.
struct SequenceSums {
  std::span<const Whole> picks;
  std::span<const Whole> scores;
  Whole num_tokens = 0;
};
SequenceSums sums_of(const Tensor& by_sequence, Whole sequence) {
  const auto row = by_sequence.view().slice(sequence, sequence + 1).span<Whole>();
  const auto experts = row.size() / 2;
  return {row.first(experts), row.subspan(experts, experts), row.back()};
}

void add(std::span<const Whole> values, std::span<Whole> to) {
  for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
}

// Over one rank's tokens; losses of sequences are counted apart. Both tensors are the host's.
BatchTotals totals_of(const Tensor& by_sequence, const Tensor& squares) {
  const auto experts = static_cast<std::size_t>(by_sequence.shape()[1] / 2);
  BatchTotals totals{.picks = std::vector<Whole>(experts), .scores = std::vector<Whole>(experts)};
  for (Whole s = 0; s < by_sequence.rows(); ++s) {
    const auto sums = sums_of(by_sequence, s);
    add(sums.picks, totals.picks);
    add(sums.scores, totals.scores);
    totals.num_tokens += sums.num_tokens;
  }
  totals.squares = squares.span<Whole>()[0];
  totals.square_fractions = squares.span<Whole>()[1];
  return totals;
}

void count_sequences(const Tensor& by_sequence, Whole top_k, BatchTotals& totals) {
  for (Whole s = 0; s < by_sequence.rows(); ++s) {
    const auto sums = sums_of(by_sequence, s);
    if (sums.num_tokens == 0) continue;
    const double loss = balance_loss(sums.picks, sums.scores, sums.num_tokens, top_k);
    ++totals.num_sequences;
    totals.sequence_losses += static_cast<Whole>(std::floor(loss));
    totals.loss_fractions += static_cast<Whole>((loss - std::floor(loss)) / RouterSums::kUnit);
  }
}

// Adds the totals of all ranks of `comm` up.
void sum_over(Communicator& comm, BatchTotals& t) {
  const auto one = [](Whole& number) { return std::span(&number, 1); };
  sum_integers(comm, {t.picks, t.scores, one(t.num_tokens), one(t.squares), one(t.square_fractions),
                      one(t.num_sequences), one(t.sequence_losses), one(t.loss_fractions)});
}

RouterLosses values_of(const BatchTotals& totals, BalanceLoss balance, Whole top_k) {
  RouterLosses losses;
  if (balance == BalanceLoss::batch) {
    losses.balance =
        static_cast<float>(balance_loss(totals.picks, totals.scores, totals.num_tokens, top_k));
  } else if (totals.num_sequences > 0) {
    losses.balance = static_cast<float>(value_of(totals.sequence_losses, totals.loss_fractions) /
                                        static_cast<double>(totals.num_sequences));
  }
  if (totals.num_tokens > 0) {
    losses.z = static_cast<float>(value_of(totals.squares, totals.square_fractions) /
                                  static_cast<double>(totals.num_tokens));
  }
  return losses;
}

}  // namespace

RouterSums zero_sums(const Device& device, const LossOptions& losses, std::int64_t num_experts,
                     std::int64_t num_sequences, std::int64_t sequence_tokens) {
  const auto width = 2 * num_experts + 1;
  // One piece of memory, so that it becomes zero at once.
  const TensorView all = backend_of(device).take({num_sequences * width + 2}, Dtype::i64);
  backend_of(device).set_zero(all);
  return {.losses = losses,
          .num_experts = num_experts,
          .sequence_tokens = sequence_tokens,
          .by_sequence = {all.data(), Dtype::i64, Shape{num_sequences, width}, width, all.owner(),
                          all.memory()},
          .squares = all.slice(num_sequences * width, num_sequences * width + 2)};
}

LossTerms::LossTerms(Device device, const RouterSums& sums, std::int64_t top_k,
                     Communicator* sequence, Communicator* batch)
    : device_(std::move(device)),
      own_(sums),
      top_k_(top_k),
      totals_(backend_of(device_).take({loss_total_words(sums.num_experts)}, Dtype::i64)) {
  const auto is_alone = [](const Communicator* comm) {
    return comm == nullptr || comm->size() == 1;
  };
  const bool by_sequence = sums.losses.balance == BalanceLoss::sequence;
  if (is_alone(batch) && (!by_sequence || is_alone(sequence))) {
    backend_of(device_).loss_totals({.sums = own_, .totals = totals_});
  } else {
    sum_over_ranks(by_sequence ? sequence : nullptr, batch);
  }
}

void LossTerms::sum_over_ranks(Communicator* sequence, Communicator* batch) {
  Tensor by_sequence = device_.to_host(own_.by_sequence);
  BatchTotals totals = totals_of(by_sequence, device_.to_host(own_.squares));
  if (sequence != nullptr) {
    sequence->all_reduce(by_sequence);
    joined_ = own_;
    joined_->by_sequence = device_.copy_of(by_sequence);
  }
  // Ranks that share sequences have the same losses of them: one of them counts.
  const bool counts = batch == nullptr || sequence == nullptr || sequence->rank() == 0;
  if (own_.losses.balance == BalanceLoss::sequence && counts) {
    count_sequences(by_sequence, top_k_, totals);
  }
  if (batch != nullptr) sum_over(*batch, totals);
  std::vector<Whole> words = totals.picks;
  words.insert(words.end(), {totals.num_tokens, totals.num_sequences});
  backend_of(device_).upload(std::as_bytes(std::span(words)), totals_);
  of_ranks_ = std::move(totals);
}

std::int64_t LossTerms::bytes() const {
  return totals_.bytes() + (joined_ ? joined_->by_sequence.bytes() : 0);
}

RouterLosses LossTerms::values() const {
  const auto balance = own_.losses.balance;
  if (of_ranks_) return values_of(*of_ranks_, balance, top_k_);
  const Tensor by_sequence = device_.to_host(own_.by_sequence);
  BatchTotals totals = totals_of(by_sequence, device_.to_host(own_.squares));
  if (balance == BalanceLoss::sequence) count_sequences(by_sequence, top_k_, totals);
  return values_of(totals, balance, top_k_);
}

RouterSlopes LossTerms::slopes(const RouterLosses& d_losses) const {
  const RouterSums& sums = joined_ ? *joined_ : own_;
  const auto& backend = backend_of(device_);
  RouterSlopes slopes{.scores = sums.losses.scores, .sequence_tokens = sums.sequence_tokens};
  if (sums.wants_scores() && d_losses.balance != 0.0F) {
    slopes.by_score = backend.take({sums.num_sequences(), sums.num_experts}, Dtype::f32);
  }
  if (sums.wants_squares() && d_losses.z != 0.0F) slopes.by_square = backend.take({1}, Dtype::f32);
  if (slopes.is_zero()) return slopes;
  backend.loss_slopes(
      {.sums = sums, .totals = totals_, .top_k = top_k_, .d_losses = d_losses, .slopes = slopes});
  return slopes;
}

}  // namespace switchyard
