// What a layer does besides its step: losses, capacity, the scale of outputs, statistics.
#include <algorithm>
#include <array>
#include <cmath>

#include "device/device_backend.h"
#include "moe/moe_layer_data.h"
#include "moe/output_scales.h"
#include "moe/plan_record.h"
#include "moe/sum_integers.h"

namespace switchyard {
namespace {

// Collective.
RouterStatistics sum_over(Communicator& comm, RouterStatistics statistics) {
  sum_integers(comm, {statistics.picks, {&statistics.num_tokens, 1}});
  return statistics;
}

// Collective over the ranks that share sequences.
void require_same_sequences(Communicator& comm, const SequenceShard& shard) {
  const std::array<Field, 2> fields{
      {{"the sequences' number", shard.batch()}, {"the sequences' length", shard.length()}}};
  require_equal_fields(fields, gather_fields(comm, fields));
}

}  // namespace

RouterSums MoeLayer::Data::make_sums(const LayerInput& in, Purpose purpose) const {
  LossOptions wanted = options.losses;
  if (purpose == Purpose::inference) wanted = {};
  const bool by_sequence = wanted.balance == BalanceLoss::sequence;
  const auto tokens = by_sequence ? in.sequence->count() : in.x.rows();
  return {wanted, options.router.num_experts, by_sequence ? in.sequence->batch() : 1,
          std::max<std::int64_t>(tokens, 1)};
}

std::vector<Communicator*> MoeLayer::Data::other_groups_of(Purpose purpose) const {
  std::vector<Communicator*> others;
  if (purpose == Purpose::inference) return others;
  const bool by_sequence = options.losses.balance == BalanceLoss::sequence;
  const bool is_global = (has_losses() && options.losses.scope == LossScope::global) ||
                         options.gradient_scale == GradientScale::global;
  if (is_global && &batch != &comm) others.push_back(&batch);
  if (by_sequence && sequence != nullptr && sequence != &comm && sequence != &batch) {
    others.push_back(sequence);
  }
  return others;
}

Tensor MoeLayer::Data::within_capacity(const Routing& routing, const RouterSums& sums) {
  const auto picks = static_cast<double>(sums.all_tokens() * options.router.top_k);
  const double share = picks / options.router.num_experts * options.capacity.factor;
  const auto most = static_cast<std::int64_t>(std::ceil(std::min(share, picks)));
  Tensor kept(routing.expert_ids.shape(), Dtype::i32);
  stats.over_capacity = device.backend().limit_picks({.expert_ids = routing.expert_ids,
                                                      .weights = routing.weights,
                                                      .rule = options.capacity.rule,
                                                      .most_picks = std::max<std::int64_t>(1, most),
                                                      .num_experts = options.router.num_experts,
                                                      .kept_ids = kept});
  return kept;
}

void MoeLayer::Data::weigh_losses(Step& step, const LayerInput& in, RouterSums sums) {
  step.statistics = {.picks = sums.all_picks(), .num_tokens = sums.all_tokens()};
  if (!has_losses()) return;
  const bool by_sequence = options.losses.balance == BalanceLoss::sequence;
  const bool is_global = options.losses.scope == LossScope::global;
  if (by_sequence && sequence != nullptr) require_same_sequences(*sequence, *in.sequence);
  step.loss_terms.emplace(std::move(sums), options.router.top_k, by_sequence ? sequence : nullptr,
                          is_global ? &batch : nullptr);
  step.losses = step.loss_terms->values();
}

void MoeLayer::Data::scale_outputs(Step& step) {
  const GradientScale rule = options.gradient_scale;
  if (rule == GradientScale::off) return;
  const bool is_global = rule == GradientScale::global;
  const bool is_known = is_global && step.loss_terms && options.losses.scope == LossScope::global;
  const auto picks = is_known ? step.loss_terms->totals().picks
                              : sum_over(is_global ? batch : comm, *step.statistics).picks;
  step.output_scales = output_scales(rule, picks, placement);
  step.scaled_weights = scaled(step.routing.weights, step.routing.expert_ids, step.output_scales);
}

void MoeLayer::Data::commit(Step& step) {
  if (!step.statistics) return;
  for (std::size_t e = 0; e < statistics.picks.size(); ++e) {
    statistics.picks[e] += step.statistics->picks[e];
  }
  statistics.num_tokens += step.statistics->num_tokens;
  step.statistics.reset();
}

RouterStatistics MoeLayer::Data::take_statistics() {
  RouterStatistics all = sum_over(batch, statistics);
  std::ranges::fill(statistics.picks, 0);
  statistics.num_tokens = 0;
  return all;
}

void MoeLayer::Data::note_status() {
  most_needed_rows = std::max(most_needed_rows, std::ranges::max(status.needed_rows));
  if (!first_problem.empty()) return;
  first_problem = status.non_finite ? status.non_finite_message : status.bad_ids_message;
}

}  // namespace switchyard
