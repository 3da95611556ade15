// What a layer does besides its step: losses, capacity, the scale of outputs, statistics.
#include <algorithm>
#include <array>

#include "comm/agreement.h"
#include "comm/sum_integers.h"
#include "moe/layer/moe_layer_data.h"
#include "moe/plan/plan_record.h"

namespace switchyard {
namespace {

// Collective over the ranks that share sequences.
void require_same_sequences(Communicator& comm, const SequenceShard& shard) {
  const std::array<Field, 2> fields{
      {{"the sequences' number", shard.batch()}, {"the sequences' length", shard.length()}}};
  require_equal_fields(comm, fields);
}

}  // namespace

RouterSums MoeLayer::Data::make_sums(const LayerInput& in, Purpose purpose) const {
  LossOptions wanted = options.losses;
  if (purpose == Purpose::inference) wanted = {};
  const bool by_sequence = wanted.balance == BalanceLoss::sequence;
  const auto tokens = by_sequence ? in.sequence->count() : in.x.rows();
  return zero_sums(device, wanted, options.router.num_experts,
                   by_sequence ? in.sequence->batch() : 1, std::max<std::int64_t>(tokens, 1));
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

TensorView MoeLayer::Data::within_capacity(const Routing& routing, const RouterSums& sums) {
  TensorView kept = device.backend().take(routing.expert_ids.shape(), Dtype::i32);
  over_capacity_ = device.backend().take({1}, Dtype::i64);
  device.backend().limit_picks({.expert_ids = routing.expert_ids,
                                .weights = routing.weights,
                                .capacity = options.capacity,
                                .sums = sums,
                                .kept_ids = kept,
                                .dropped = *over_capacity_});
  return kept;
}

void MoeLayer::Data::weigh_losses(Step& step, const LayerInput& in) {
  if (!has_losses()) return;
  const bool by_sequence = options.losses.balance == BalanceLoss::sequence;
  const bool is_global = options.losses.scope == LossScope::global;
  if (by_sequence && sequence != nullptr) require_same_sequences(*sequence, *in.sequence);
  step.loss_terms.emplace(device, *step.sums, options.router.top_k,
                          by_sequence ? sequence : nullptr, is_global ? &batch : nullptr);
}

// [E] i64: over all ranks that count for the scale of outputs.
ConstTensorView MoeLayer::Data::all_picks(const Step& step) const {
  const bool is_global = options.gradient_scale == GradientScale::global;
  const bool is_known = is_global && step.loss_terms && options.losses.scope == LossScope::global;
  if (is_known) return step.loss_terms->picks();
  const auto& backend = device.backend();
  const TensorView totals = backend.take({loss_total_words(step.sums->num_experts)}, Dtype::i64);
  backend.loss_totals({.sums = *step.sums, .totals = totals});
  const TensorView picks = totals.slice(0, step.sums->num_experts);
  Communicator& group = is_global ? batch : comm;
  if (group.size() > 1) {
    Tensor numbers = device.to_host(picks);
    sum_integers(group, {numbers.span<std::int64_t>()});
    backend.upload(std::as_bytes(numbers.span<std::int64_t>()), picks);
  }
  return picks;
}

void MoeLayer::Data::scale_outputs(Step& step) {
  if (options.gradient_scale == GradientScale::off) return;
  const auto& backend = device.backend();
  step.output_scales = backend.take({options.router.num_experts}, Dtype::f32);
  backend.output_scales({.rule = options.gradient_scale,
                         .picks = all_picks(step),
                         .owners = *owners,
                         .scales = *step.output_scales});
  step.scaled_weights = backend.take(step.routing.weights.shape(), Dtype::f32);
  backend.scale_by_expert({.expert_ids = step.routing.expert_ids,
                           .scales = *step.output_scales,
                           .from = step.routing.weights,
                           .to = *step.scaled_weights});
}

void MoeLayer::Data::commit(Step& step) {
  if (step.is_counted) return;
  device.backend().count_picks(*step.sums, statistics);
  step.is_counted = true;
}

const PickCounts& MoeLayer::Data::read_pick_counts() const {
  const Tensor words = device.to_host(statistics);
  const auto numbers = words.span<std::int64_t>();
  counted.picks.assign(numbers.begin(), numbers.end() - 1);
  counted.num_tokens = numbers.back();
  return counted;
}

PickCounts MoeLayer::Data::take_pick_counts() {
  PickCounts all = read_pick_counts();
  sum_integers(batch, {all.picks, {&all.num_tokens, 1}});
  device.backend().set_zero(statistics);
  return all;
}

// On a GPU nothing is read here. One that is alone finds its plans' reports in the step's words.
void MoeLayer::Data::note_plan(const Plan& plan) {
  const bool is_host = device.memory() == Memory::host;
  if (!is_host) last_plan_ = plan;
  if (step_words) return;
  const PlanStatus& met = plan.status();
  most_needed_rows = std::max(most_needed_rows, std::ranges::max(met.needed_rows));
  if (first_problem.empty()) {
    first_problem = met.non_finite ? met.non_finite_message : met.bad_ids_message;
  }
  if (!is_host) return;
  status = met;
  describe_plan(plan, stats);
  if (over_capacity_) stats.over_capacity = over_capacity_->span<std::int64_t>()[0];
}

const PlanStatus& MoeLayer::Data::read_status() const {
  if (last_plan_) status = last_plan_->status();
  return status;
}

const LayerStats& MoeLayer::Data::read_stats() const {
  if (device.memory() == Memory::host) return stats;
  if (last_plan_) describe_plan(*last_plan_, stats);
  if (over_capacity_) {
    stats.over_capacity = device.to_host(*over_capacity_).span<std::int64_t>()[0];
  }
  stats.forward = stages_of(forward_timer_);
  stats.backward = stages_of(backward_timer_);
  return stats;
}

}  // namespace switchyard
