// What a layer does besides its step: losses, capacity, the scale of outputs, statistics.
#include <algorithm>
#include <cmath>

#include "device/device_backend.h"
#include "moe/moe_layer_data.h"
#include "moe/output_scales.h"

namespace switchyard {
namespace {

// Collective.
RouterStatistics sum_over(Communicator& comm, const RouterStatistics& own) {
  const auto experts = own.picks.size();
  Tensor all({static_cast<std::int64_t>(experts) + 1}, Dtype::i64);
  const auto values = all.span<std::int64_t>();
  std::ranges::copy(own.picks, values.begin());
  values.back() = own.num_tokens;
  comm.all_reduce(all);
  return {.picks = {values.begin(), values.end() - 1}, .num_tokens = values.back()};
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

Tensor MoeLayer::Data::within_capacity(const Routing& routing, const RouterSums& sums) {
  std::int64_t tokens = 0;
  for (std::int64_t s = 0; s < sums.num_sequences(); ++s) tokens += sums.num_tokens(s);
  const auto picks = static_cast<double>(tokens * options.router.top_k);
  const double share = picks / options.router.num_experts * options.capacity.factor;
  Tensor kept(routing.expert_ids.shape(), Dtype::i32);
  stats.over_capacity = device.backend().limit_picks(
      {.expert_ids = routing.expert_ids,
       .weights = routing.weights,
       .rule = options.capacity.rule,
       .most_picks = std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(share))),
       .num_experts = options.router.num_experts,
       .kept_ids = kept});
  return kept;
}

void MoeLayer::Data::weigh_losses(Step& step, RouterSums sums) {
  RouterStatistics own{
      .picks = std::vector<std::int64_t>(static_cast<std::size_t>(options.router.num_experts))};
  for (std::int64_t s = 0; s < sums.num_sequences(); ++s) {
    for (std::size_t e = 0; e < own.picks.size(); ++e) own.picks[e] += sums.picks(s)[e];
    own.num_tokens += sums.num_tokens(s);
  }
  const bool is_global = has_losses() && options.losses.scope == LossScope::global;
  step.loss_terms.emplace(std::move(sums), options.router.top_k, has_losses() ? sequence : nullptr,
                          is_global ? &batch : nullptr);
  step.losses = step.loss_terms->values();
  step.statistics = std::move(own);
}

void MoeLayer::Data::scale_outputs(Step& step) {
  const GradientScale rule = options.gradient_scale;
  if (rule == GradientScale::off) return;
  const auto all = sum_over(rule == GradientScale::global ? batch : comm, *step.statistics);
  step.output_scales = output_scales(rule, all.picks, placement);
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
