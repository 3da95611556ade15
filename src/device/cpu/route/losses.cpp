// Small sums and products around a router's losses.
#include <algorithm>
#include <numeric>
#include <vector>

#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

using Whole = std::int64_t;

// Of one sequence.
struct SequenceSums {
  std::span<const Whole> picks;  // [E]
  Whole num_tokens = 0;
};
SequenceSums sums_of(const RouterSums& sums, Whole sequence) {
  const std::span<const Whole> row = sums.by_sequence.slice(sequence, sequence + 1).span<Whole>();
  return {row.first(static_cast<std::size_t>(sums.num_experts)), row.back()};
}

void add(std::span<const Whole> values, std::span<Whole> to) {
  for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
}

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
  const auto num_tokens = totals[batch.size()];
  const auto num_sequences = static_cast<double>(std::max<Whole>(totals[batch.size() + 1], 1));
  for (Whole s = 0; s < sums.num_sequences(); ++s) {
    const TensorView row = by_score.slice(s, s + 1);
    if (sums.losses.balance == BalanceLoss::batch) {
      fill_slopes(batch, args.d_losses.balance * balance_factor(experts, num_tokens, args.top_k),
                  row);
    } else {
      const auto own = sums_of(sums, s);
      fill_slopes(own.picks,
                  args.d_losses.balance / num_sequences *
                      balance_factor(experts, own.num_tokens, args.top_k),
                  row);
    }
  }
}

}  // namespace

void loss_totals(const LossTotals& args) {
  const auto totals = args.totals.span<Whole>();
  std::ranges::fill(totals, 0);
  const auto experts = static_cast<std::size_t>(args.sums.num_experts);
  for (Whole s = 0; s < args.sums.num_sequences(); ++s) {
    const auto own = sums_of(args.sums, s);
    add(own.picks, totals);
    totals[experts] += own.num_tokens;
    totals[experts + 1] += own.num_tokens > 0 ? 1 : 0;
  }
}

void loss_slopes(const LossSlopes& args) {
  if (args.slopes.by_score) fill_score_slopes(args, *args.slopes.by_score);
  if (!args.slopes.by_square) return;
  const auto num_tokens =
      args.totals.span<Whole>()[static_cast<std::size_t>(args.sums.num_experts)];
  args.slopes.by_square->span<float>()[0] =
      num_tokens > 0 ? static_cast<float>(args.d_losses.z / static_cast<double>(num_tokens)) : 0.0F;
}

void count_picks(const RouterSums& sums, const TensorView& statistics) {
  const auto counted = statistics.span<Whole>();
  for (Whole s = 0; s < sums.num_sequences(); ++s) {
    const auto own = sums_of(sums, s);
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
