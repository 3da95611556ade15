// SPDX-License-Identifier: Apache-2.0
// Computes the losses from a router's sums, and the slopes of its scores. Both are computed from
// integers only, so that they have the same bits on every rank and for any number of ranks.
#include <span>
#include <string_view>

#include "device/device_backend.h"
#include "moe/layer/moe_layer_data.h"

namespace switchyard {
namespace {

using Whole = std::int64_t;

double value_of(Whole whole, Whole fractions) {
  return static_cast<double>(whole) + static_cast<double>(fractions) * RouterSums::kUnit;
}

// A table of totals in host memory.
struct Totals {
  std::span<const Whole> words;
  Whole num_experts = 0;

  Whole at(Whole word) const { return words[static_cast<std::size_t>(word)]; }
  std::span<const Whole> of_experts(Whole first) const {
    return words.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(num_experts));
  }
};

RouterLosses values_of(const Totals& totals, BalanceLoss balance, Whole top_k) {
  const Whole experts = totals.num_experts;
  const Whole num_tokens = totals.at(tokens_word(experts));
  const Whole num_sequences = totals.at(sequences_word(experts));
  RouterLosses losses;
  if (balance == BalanceLoss::batch) {
    losses.balance = static_cast<float>(balance_loss(totals.of_experts(picks_word(experts)),
                                                     totals.of_experts(scores_word(experts)),
                                                     num_tokens, top_k));
  } else if (num_sequences > 0) {
    losses.balance = static_cast<float>(value_of(totals.at(sequence_losses_word(experts)),
                                                 totals.at(loss_fractions_word(experts))) /
                                        static_cast<double>(num_sequences));
  }
  if (num_tokens > 0) {
    losses.z = static_cast<float>(
        value_of(totals.at(squares_word(experts)), totals.at(square_fractions_word(experts))) /
        static_cast<double>(num_tokens));
  }
  return losses;
}

bool has_others(const Communicator* comm) { return comm != nullptr && comm->size() > 1; }

// Runs work in which hosts wait for each other. A step that is being captured cannot wait; `why`
// then explains the error.
template <typename Work>
void by_hosts(std::string_view why, Work work) {
  try {
    work();
  } catch (const DeviceError& error) {
    throw DeviceError(fmt::format("{}: {}", why, error.what()));
  }
}

constexpr std::string_view kSumsByHosts =
    "the batch's sums go through host memory, because its ranks cannot reach each other's GPU "
    "memory; to capture the step, keep the batch on one host, or use LossScope::rank without "
    "GradientScale::global";
constexpr std::string_view kSequencesByHosts =
    "sequences divided over ranks are joined in host memory, because the sequence group has no "
    "peer memory; to capture the step, use BalanceLoss::batch or whole sequences";

}  // namespace

RouterSums zero_sums(const Device& device, const LossOptions& losses, std::int64_t num_experts,
                     std::int64_t num_sequences, std::int64_t sequence_tokens) {
  const auto width = 2 * num_experts + 1;
  // One piece of memory, so that a single call zeroes it.
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
                     Communicator* sequence, const SumOverRanks* batch)
    : device_(std::move(device)),
      own_(sums),
      top_k_(top_k),
      totals_(backend_of(device_).take({loss_total_words(sums.num_experts)}, Dtype::i64)) {
  const bool is_cut = sums.losses.balance == BalanceLoss::sequence && has_others(sequence);
  if (is_cut) by_hosts(kSequencesByHosts, [&] { join_over(*sequence); });
  LossTotals args{.sums = own_, .top_k = top_k_, .totals = totals_};
  if (joined_) args.joined = joined_->by_sequence;
  args.counts_sequences = batch == nullptr || !is_cut || sequence->rank() == 0;
  backend_of(device_).loss_totals(args);
  if (batch == nullptr) return;
  check_ = batch->peer_check();
  const auto add_up = [&] { batch->add_up(totals_); };
  if (check_.expired()) {
    by_hosts(kSumsByHosts, add_up);
  } else {
    add_up();
  }
}

void LossTerms::join_over(Communicator& sequence) {
  Tensor by_sequence = device_.to_host(own_.by_sequence);
  sequence.all_reduce(by_sequence);
  joined_ = own_;
  joined_->by_sequence = device_.copy_of(by_sequence);
}

std::int64_t LossTerms::bytes() const {
  return totals_.bytes() + (joined_ ? joined_->by_sequence.bytes() : 0);
}

RouterLosses LossTerms::values() const {
  const Tensor words = device_.to_host(totals_);
  if (const auto ranks = check_.lock()) ranks->check();
  return values_of({words.span<Whole>(), own_.num_experts}, own_.losses.balance, top_k_);
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
