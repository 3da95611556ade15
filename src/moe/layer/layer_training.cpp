// SPDX-License-Identifier: Apache-2.0
// A layer's work besides its two passes: losses, capacity, output scales and statistics.
#include <algorithm>
#include <array>

#include "comm/agreement.h"
#include "comm/sum_integers.h"
#include "moe/layer/moe_layer_data.h"
#include "moe/plan/plan_data.h"
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

RouterSums MoeLayerData::make_sums(const LayerInput& in, Purpose purpose) const {
  LossOptions wanted = options.losses;
  if (purpose == Purpose::inference) wanted = {};
  const bool by_sequence = wanted.balance == BalanceLoss::sequence;
  const auto tokens = by_sequence ? in.sequence->count() : in.x.rows();
  return zero_sums(device, wanted, options.router.num_experts,
                   by_sequence ? in.sequence->batch() : 1, std::max<std::int64_t>(tokens, 1));
}

// Collective: the options are equal on all ranks, so all of them make the same sums.
void MoeLayerData::make_sums_over_ranks() {
  const auto words = loss_total_words(options.router.num_experts);
  const bool uses_peers = mover_kind == MoverKind::peer || device.memory() == Memory::gpu;
  const bool is_global = (has_losses() && options.losses.scope == LossScope::global) ||
                         options.gradient_scale == GradientScale::global;
  if (is_global) sum_over_batch.emplace(batch, device, uses_peers, words);
  if (options.gradient_scale == GradientScale::rank) {
    sum_over_experts.emplace(comm, device, uses_peers, words);
  }
}

std::vector<Communicator*> MoeLayerData::other_comms_of(Purpose purpose) const {
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

TensorView MoeLayerData::within_capacity(const Routing& routing, const RouterSums& sums) {
  TensorView kept = backend_of(device).take(routing.expert_ids.shape(), Dtype::i32);
  over_capacity_ = backend_of(device).take({1}, Dtype::i64);
  backend_of(device).limit_picks({.expert_ids = routing.expert_ids,
                                  .weights = routing.weights,
                                  .capacity = options.capacity,
                                  .sums = sums,
                                  .kept_ids = kept,
                                  .dropped = *over_capacity_});
  return kept;
}

void MoeLayerData::weigh_losses(Saved& saved, const LayerInput& in) {
  if (!has_losses()) return;
  const bool by_sequence = options.losses.balance == BalanceLoss::sequence;
  const bool is_global = options.losses.scope == LossScope::global;
  if (by_sequence && sequence != nullptr) require_same_sequences(*sequence, *in.sequence);
  saved.loss_terms.emplace(device, *saved.sums, options.router.top_k,
                           by_sequence ? sequence : nullptr,
                           is_global ? &*sum_over_batch : nullptr);
}

// Returns the picks of each expert, [E] i64, over all ranks that count for the output scales.
ConstTensorView MoeLayerData::all_picks(const Saved& saved) const {
  const bool is_global = options.gradient_scale == GradientScale::global;
  const bool is_known = is_global && saved.loss_terms && options.losses.scope == LossScope::global;
  if (is_known) return saved.loss_terms->picks();
  return LossTerms(device, *saved.sums, options.router.top_k, nullptr,
                   is_global ? &*sum_over_batch : &*sum_over_experts)
      .picks();
}

void MoeLayerData::scale_outputs(Saved& saved) {
  if (options.gradient_scale == GradientScale::off) return;
  const auto& backend = backend_of(device);
  saved.output_scales = backend.take({options.router.num_experts}, Dtype::f32);
  backend.output_scales({.rule = options.gradient_scale,
                         .picks = all_picks(saved),
                         .owners = *owners,
                         .scales = *saved.output_scales});
  saved.scaled_weights = backend.take(saved.routing.weights.shape(), Dtype::f32);
  backend.scale_by_expert({.expert_ids = saved.routing.expert_ids,
                           .scales = *saved.output_scales,
                           .from = saved.routing.weights,
                           .to = *saved.scaled_weights});
}

void MoeLayerData::commit(Saved& saved) {
  if (saved.is_counted) return;
  backend_of(device).count_picks(*saved.sums, statistics);
  saved.is_counted = true;
}

PickCounts MoeLayerData::read_pick_counts() const {
  const Tensor words = device.to_host(statistics);
  const auto numbers = words.span<std::int64_t>();
  return {.picks = {numbers.begin(), numbers.end() - 1}, .num_tokens = numbers.back()};
}

PickCounts MoeLayerData::take_pick_counts() {
  PickCounts all = read_pick_counts();
  sum_integers(batch, {all.picks, {&all.num_tokens, 1}});
  backend_of(device).set_zero(statistics);
  return all;
}

// Reads nothing on a GPU, where plans report in step_words.
void MoeLayerData::note_plan(const Plan& plan) {
  const bool is_host = device.memory() == Memory::host;
  if (!is_host) last_plan_ = plan;
  if (step_words) return;
  const PlanStatus& met = data_of(plan).summary().status;
  most_needed_rows = std::max(most_needed_rows, std::ranges::max(met.needed_rows));
  most_needed_tokens = std::max(most_needed_tokens, std::ranges::max(met.needed_tokens));
  if (first_problem.empty()) {
    first_problem = met.non_finite ? met.non_finite_message : met.bad_ids_message;
  }
  if (!is_host) return;
  status = met;
  describe_plan(plan, stats);
  if (over_capacity_) stats.over_capacity = over_capacity_->span<std::int64_t>()[0];
}

PlanStatus MoeLayerData::read_status() const {
  check_ranks();
  if (!last_plan_) return status;
  PlanStatus read = last_plan_->status();
  check_ranks();  // a failure may have surfaced during the fetch
  return read;
}

LayerStats MoeLayerData::read_stats() const {
  check_ranks();
  LayerStats read = stats;
  if (device.memory() == Memory::host) return read;
  if (last_plan_) describe_plan(*last_plan_, read);
  if (over_capacity_) {
    read.over_capacity = device.to_host(*over_capacity_).span<std::int64_t>()[0];
  }
  read.forward = stages_of(forward_timer_);
  read.backward = stages_of(backward_timer_);
  return read;
}

}  // namespace switchyard
