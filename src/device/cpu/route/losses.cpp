// SPDX-License-Identifier: Apache-2.0
// The sums and slopes of a router's losses, and the scaling of experts' outputs.
#include <algorithm>
#include <cmath>
#include <vector>

#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

using Whole = std::int64_t;

// A row of by_sequence.
struct SequenceSums {
  std::span<const Whole> picks;   // [E]
  std::span<const Whole> scores;  // [E]
  Whole num_tokens = 0;
};
SequenceSums sums_of(const ConstTensorView& by_sequence, Whole sequence) {
  const auto row = by_sequence.slice(sequence, sequence + 1).span<Whole>();
  const auto experts = row.size() / 2;
  return {row.first(experts), row.subspan(experts, experts), row.back()};
}

void add(std::span<const Whole> values, std::span<Whole> to) {
  for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
}

Whole word(std::span<const Whole> totals, Whole at) { return totals[static_cast<std::size_t>(at)]; }

void fill_slopes(std::span<const Whole> picks, double factor, const TensorView& row) {
  const auto slopes = row.span<float>();
  for (std::size_t e = 0; e < picks.size(); ++e) {
    slopes[e] = static_cast<float>(static_cast<double>(picks[e]) * factor);
  }
}

void fill_score_slopes(const LossSlopes& args, const TensorView& by_score) {
  const RouterSums& sums = args.sums;
  const auto totals = args.totals.span<Whole>();
  const auto experts = sums.num_experts;
  const auto batch = totals.first(static_cast<std::size_t>(experts));
  const auto num_tokens = word(totals, tokens_word(experts));
  const auto num_sequences =
      static_cast<double>(std::max<Whole>(word(totals, sequences_word(experts)), 1));
  for (Whole s = 0; s < sums.num_sequences(); ++s) {
    const TensorView row = by_score.slice(s, s + 1);
    if (sums.losses.balance == BalanceLoss::batch) {
      fill_slopes(batch, args.d_losses.balance * balance_factor(experts, num_tokens, args.top_k),
                  row);
    } else {
      const auto own = sums_of(sums.by_sequence, s);
      fill_slopes(own.picks,
                  args.d_losses.balance / num_sequences *
                      balance_factor(experts, own.num_tokens, args.top_k),
                  row);
    }
  }
}

void count_sequences(const LossTotals& args, const ConstTensorView& by_sequence) {
  const bool has_losses = args.sums.losses.balance == BalanceLoss::sequence;
  const auto experts = args.sums.num_experts;
  const auto totals = args.totals.span<Whole>();
  const auto to = [&](Whole at) -> Whole& { return totals[static_cast<std::size_t>(at)]; };
  for (Whole s = 0; s < by_sequence.rows(); ++s) {
    const auto row = sums_of(by_sequence, s);
    if (row.num_tokens == 0) continue;
    ++to(sequences_word(experts));
    if (!has_losses) continue;
    const double loss = balance_loss(row.picks, row.scores, row.num_tokens, args.top_k);
    const double whole = std::floor(loss);
    to(sequence_losses_word(experts)) += static_cast<Whole>(whole);
    to(loss_fractions_word(experts)) += static_cast<Whole>((loss - whole) / RouterSums::kUnit);
  }
}

}  // namespace

void loss_totals(const LossTotals& args) {
  const RouterSums& sums = args.sums;
  const auto totals = args.totals.span<Whole>();
  std::ranges::fill(totals, 0);
  for (Whole s = 0; s < sums.num_sequences(); ++s) {
    add(sums.by_sequence.slice(s, s + 1).span<Whole>(), totals);
  }
  add(sums.squares.span<Whole>(),
      totals.subspan(static_cast<std::size_t>(squares_word(sums.num_experts))));
  if (args.counts_sequences) count_sequences(args, args.joined.value_or(sums.by_sequence));
}

void loss_slopes(const LossSlopes& args) {
  if (args.slopes.by_score) fill_score_slopes(args, *args.slopes.by_score);
  if (!args.slopes.by_square) return;
  const auto num_tokens = word(args.totals.span<Whole>(), tokens_word(args.sums.num_experts));
  args.slopes.by_square->span<float>()[0] =
      num_tokens > 0 ? static_cast<float>(args.d_losses.z / static_cast<double>(num_tokens)) : 0.0F;
}

void sum_words(const ConstTensorView& rows, const TensorView& sum) {
  const auto words = sum.span<Whole>();
  std::ranges::fill(words, 0);
  for (Whole r = 0; r < rows.rows(); ++r) add(rows.slice(r, r + 1).span<Whole>(), words);
}

void count_picks(const RouterSums& sums, const TensorView& statistics) {
  const auto counted = statistics.span<Whole>();
  for (Whole s = 0; s < sums.num_sequences(); ++s) {
    const auto own = sums_of(sums.by_sequence, s);
    add(own.picks, counted);
    counted.back() += own.num_tokens;
  }
}

void output_scales(const OutputScales& args) {
  const auto picks = args.picks.span<Whole>();
  const auto owners = args.owners.span<std::int32_t>();
  const auto scales = args.scales.span<float>();
  const bool by_rank = args.rule == GradientScale::rank;
  struct Share {
    Whole rows = 0;
    Whole experts = 0;
  };
  const auto num_shares = by_rank && !owners.empty() ? std::ranges::max(owners) + 1 : 1;
  std::vector<Share> shares(static_cast<std::size_t>(num_shares));
  const auto share_of = [&](std::size_t e) -> Share& {
    return shares[by_rank ? static_cast<std::size_t>(owners[e]) : 0];
  };
  for (std::size_t e = 0; e < picks.size(); ++e) {
    share_of(e).rows += picks[e];
    ++share_of(e).experts;
  }
  for (std::size_t e = 0; e < picks.size(); ++e) {
    const Share& share = share_of(e);
    const double mean = static_cast<double>(share.rows) / static_cast<double>(share.experts);
    scales[e] = picks[e] == 0 ? 1.0F : static_cast<float>(mean / static_cast<double>(picks[e]));
  }
}

void scale_by_expert(const ScaleByExpert& args) {
  const auto ids = args.expert_ids.span<std::int32_t>();
  const auto scales = args.scales.span<float>();
  const auto from = args.from.span<float>();
  const auto to = args.to.span<float>();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    to[i] = ids[i] < 0 ? from[i] : from[i] * scales[static_cast<std::size_t>(ids[i])];
  }
}

}  // namespace switchyard::cpu
