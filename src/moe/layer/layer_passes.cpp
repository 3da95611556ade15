// SPDX-License-Identifier: Apache-2.0
// A layer's forward and backward: which tensors go where, and what is kept.
#include <array>

#include "core/given.h"
#include "moe/layer/moe_layer_data.h"

namespace switchyard {

TensorView MoeLayerData::take_rows(const Plan& plan, std::int64_t width) const {
  return backend_of(device).take({plan.row_capacity(), width}, options.dtype);
}
TensorView MoeLayerData::take_moved_rows(const Plan& plan) const {
  return mover->take({plan.row_capacity(), options.hidden}, options.dtype);
}
TensorView MoeLayerData::take_row_weights(const Plan& plan) const {
  return mover->take({plan.row_capacity()}, Dtype::f32);
}
TensorView MoeLayerData::take_shared_inner(std::int64_t num_tokens) const {
  return backend_of(device).take({num_tokens, shared->options().inner_width()}, options.dtype);
}

Saved MoeLayerData::forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
                            Purpose purpose) {
  or_abort(comms_of(purpose), kForward, [&] { check_ranks(); });
  const auto bytes_before = mover->bytes_on_wire();
  waited_before_.assign(comm.waited_for().begin(), comm.waited_for().end());
  stats.backward.clear();
  backward_timer_.reset();
  // Released first, so that every forward reuses the same memory.
  last_plan_.reset();
  over_capacity_.reset();
  StageClock clock(backend_of(device), stats.forward, forward_timer_);
  Saved saved = route_and_plan(weights, in, purpose, clock);
  or_abort(comms_of(purpose), kForward, [&] {
    forward_experts(weights, saved, y, purpose, clock);
    if (shared) forward_shared(weights, saved, y, purpose, clock);
  });
  stats.bytes_on_wire = mover->bytes_on_wire() - bytes_before;
  note_waits();
  return saved;
}

ExpertsInput MoeLayerData::bring_rows(Saved& saved, const TensorView& rows, StageClock& clock) {
  const bool reads = experts.reads_tokens();
  if (receives(saved.plan)) {
    saved.received = mover->receive(saved.plan, saved.x, saved.weights());
    if (comm.size() > 1) clock.end("dispatch");
    if (reads) {
      ExpertsInput in{.tokens = tokens_of(saved)};
      if (weights_travel()) in.row_weights = saved.received->weights;
      return in;
    }
  }
  Scatter sent{.tokens = saved.x, .rows = rows};
  ExpertsInput in{.rows = rows};
  if (weights_travel()) {
    sent.token_scalars = saved.weights();
    sent.row_scalars = take_row_weights(saved.plan);
    in.row_weights = *sent.row_scalars;
  }
  if (saved.received) {
    backend_of(device).fill_rows(rows_of(saved.plan, *saved.received, rows, sent.row_scalars));
  } else {
    mover->scatter(saved.plan, sent);
  }
  clock.end("dispatch");
  return in;
}

void MoeLayerData::forward_experts(const MoeWeights& weights, Saved& saved, const TensorView& y,
                                   Purpose purpose, StageClock& clock) {
  const bool training = purpose == Purpose::training;
  const bool keep_rows =
      training && options.keep == Keep::rows && comm.size() > 1 && !receives(saved.plan);
  const TensorView rows = take_moved_rows(saved.plan);
  const ExpertsInput in = bring_rows(saved, rows, clock);
  if (keep_rows) saved.rows = rows;
  if (training && options.keep != Keep::nothing) {
    saved.inner = take_rows(saved.plan, experts.options().inner_width());
  }
  const TensorView results = keep_rows ? take_moved_rows(saved.plan) : rows;
  WorkTimes spent;
  backend_of(device).experts_forward({.options = experts.options(),
                                      .weights = weights.experts,
                                      .row_offsets = saved.plan.row_offsets(),
                                      .group_rows = saved.plan.group_rows(),
                                      .in = in,
                                      .out = {.out = results, .inner = saved.inner},
                                      .times = &spent});
  clock.end_experts(spent);
  if (saved.received && options.keep != Keep::rows) saved.received->tokens = {};

  Gather returned{.rows = results, .tokens = y};
  if (!weights_travel()) returned.weights = saved.weights();
  mover->gather(saved.plan, returned);
  if (&batch != &comm) spoil(std::array{y});
  clock.end("combine");
}

void MoeLayerData::forward_shared(const MoeWeights& weights, Saved& saved, const TensorView& y,
                                  Purpose purpose, StageClock& clock) {
  if (purpose == Purpose::training && options.keep != Keep::nothing) {
    saved.shared_inner = take_shared_inner(saved.x.rows());
  }
  backend_of(device).shared_forward({.options = shared->options(),
                                     .weights = weights.shared,
                                     .x = saved.x,
                                     .inner = saved.shared_inner,
                                     .y = y});
  // Biases make padding non-zero.
  if (saved.valid) backend_of(device).zero_padding(y, *saved.valid);
  clock.end("shared");
}

void MoeLayerData::backward(const MoeWeights& weights, Saved& saved, const LayerBackwardInput& in,
                            const LayerBackwardOutput& out) {
  or_abort(comms, kBackward, [&] { check_ranks(); });
  const auto bytes_before = mover->bytes_on_wire();
  StageClock clock(backend_of(device), stats.backward, backward_timer_);
  or_abort(comms, kBackward, [&] {
    LayerBackwardOutput routed = out;
    if (!out.d_weights) {
      routed.d_weights = backend_of(device).take(saved.routing.weights.shape(), Dtype::f32);
    }
    backward_experts(weights, saved, in, routed, clock);
    if (!saved.is_routing_given) backward_router(weights, saved, in, routed, clock);
    if (shared) {
      const bool is_padded = saved.valid.has_value();
      const ConstTensorView d_y = is_padded ? without_padding(in.d_y, *saved.valid) : in.d_y;
      backward_shared(weights, saved, d_y, out, clock);
    }
  });
  commit(saved);
  stats.bytes_on_wire += mover->bytes_on_wire() - bytes_before;
  note_waits();
}

ExpertsBackwardInput MoeLayerData::receive_gradients(Saved& saved, const ConstTensorView& d_y,
                                                     StageClock& clock) {
  ReceivedTokens& received = *saved.received;
  const ConstTensorView d_out = mover->receive(saved.plan, d_y);
  if (comm.size() > 1) clock.end("combine_backward");
  if (!is_given(received.tokens)) {
    received.tokens = mover->receive(saved.plan, saved.x);
    if (comm.size() > 1) clock.end("dispatch_again");
  }
  if (experts.reads_tokens()) {
    return {.row_weights = received.weights,
            .inner = *saved.inner,
            .d_out = d_out,
            .tokens = tokens_of(saved)};
  }
  const TensorView rows = take_rows(saved.plan, options.hidden);
  const TensorView d_rows = take_rows(saved.plan, options.hidden);
  const TensorView row_weights = backend_of(device).take({saved.plan.row_capacity()}, Dtype::f32);
  backend_of(device).fill_rows(rows_of(saved.plan, received, rows, row_weights));
  const ReceivedTokens gradients{d_out, received.weights, received.row_sources};
  backend_of(device).fill_rows(rows_of(saved.plan, gradients, d_rows, {}));
  return {.rows = rows, .row_weights = row_weights, .inner = *saved.inner, .d_out = d_rows};
}

// d_y arrives unweighted with its weights beside it, so that the experts can compute the weights'
// gradients without their own outputs.
ExpertsBackwardInput MoeLayerData::bring_gradients(Saved& saved, const ConstTensorView& d_y,
                                                   StageClock& clock) {
  const auto inner_rows = saved.inner ? InnerRows::kept : InnerRows::to_be_computed;
  if (!saved.inner) saved.inner = take_rows(saved.plan, experts.options().inner_width());
  if (saved.received) {
    ExpertsBackwardInput in = receive_gradients(saved, d_y, clock);
    in.inner_rows = inner_rows;
    return in;
  }
  const TensorView d_out = take_moved_rows(saved.plan);
  const TensorView row_weights = take_row_weights(saved.plan);
  mover->scatter(
      saved.plan,
      {.tokens = d_y, .rows = d_out, .token_scalars = saved.weights(), .row_scalars = row_weights});
  clock.end("combine_backward");
  if (!saved.rows) {
    saved.rows = take_moved_rows(saved.plan);
    mover->scatter(saved.plan, {.tokens = saved.x, .rows = *saved.rows});
    clock.end("dispatch_again");
  }
  return {.rows = *saved.rows,
          .row_weights = row_weights,
          .inner = *saved.inner,
          .inner_rows = inner_rows,
          .d_out = d_out};
}

void MoeLayerData::backward_experts(const MoeWeights& weights, Saved& saved,
                                    const LayerBackwardInput& in, const LayerBackwardOutput& out,
                                    StageClock& clock) {
  const ExpertsBackwardInput brought = bring_gradients(saved, in.d_y, clock);
  const TensorView d_rows = take_moved_rows(saved.plan);
  ExpertsBackwardOutput made{
      .d_rows = d_rows, .gradients = out.gradients.experts, .mode = out.mode};
  Gather returned{.rows = d_rows, .tokens = out.d_x};
  if (brought.tokens && comm.size() == 1) {
    backend_of(device).set_zero(*out.d_weights);  // experts skip picks without a row
    made.d_row_weights = out.d_weights;
  } else {
    made.d_row_weights = brought.tokens ? mover->take(saved.received->weights.shape(), Dtype::f32)
                                        : take_row_weights(saved.plan);
    returned.row_scalars = *made.d_row_weights;
    returned.token_scalars = out.d_weights;
    returned.scalars_by_source = brought.tokens.has_value();
  }
  WorkTimes spent;
  backend_of(device).experts_backward({.options = experts.options(),
                                       .weights = weights.experts,
                                       .row_offsets = saved.plan.row_offsets(),
                                       .group_rows = saved.plan.group_rows(),
                                       .in = brought,
                                       .out = made,
                                       .times = &spent});
  clock.end_experts(spent);
  mover->gather(saved.plan, returned);
  if (saved.output_scales) {
    backend_of(device).scale_by_expert({.expert_ids = saved.routing.expert_ids,
                                        .scales = *saved.output_scales,
                                        .from = *out.d_weights,
                                        .to = *out.d_weights});
  }
  if (&batch != &comm) spoil(std::array{out.d_x, *out.d_weights});
  spoil(out.gradients);
  clock.end("dispatch_backward");
}

// Poisons gradients that experts computed from rows that never arrived.
void MoeLayerData::spoil(const MoeGradients& gradients) const {
  std::vector<TensorView> views;
  for (const auto& expert : gradients.experts) {
    for (const auto& view : {expert.gate, expert.up, expert.down, expert.gate_bias, expert.up_bias,
                             expert.down_bias}) {
      if (is_given(view)) views.push_back(view);
    }
  }
  spoil(views);
}

void MoeLayerData::spoil(std::span<const TensorView> views) const {
  mover->spoil(views);
  if (sum_over_batch && &batch != &comm) sum_over_batch->spoil(views);
}

void MoeLayerData::check_ranks() const {
  mover->check();
  if (sum_over_batch) sum_over_batch->check();
}

void MoeLayerData::backward_router(const MoeWeights& weights, const Saved& saved,
                                   const LayerBackwardInput& in, const LayerBackwardOutput& out,
                                   StageClock& clock) {
  RouterSlopes slopes;
  if (saved.loss_terms) slopes = saved.loss_terms->slopes(in.d_losses);
  const RouterBackwardInput reached{.x = saved.x,
                                    .expert_ids = saved.routing.expert_ids,
                                    .d_weights = *out.d_weights,
                                    .valid = saved.mask()};
  const RouterBackwardOutput made{
      .d_x = out.d_x, .gradients = out.gradients.router, .mode = out.mode};
  backend_of(device).route_tokens_backward(
      {options.router, weights.router, reached, made, &slopes});
  clock.end("route_backward");
}

void MoeLayerData::backward_shared(const MoeWeights& weights, Saved& saved,
                                   const ConstTensorView& d_y, const LayerBackwardOutput& out,
                                   StageClock& clock) {
  const auto inner_rows = saved.shared_inner ? InnerRows::kept : InnerRows::to_be_computed;
  if (!saved.shared_inner) saved.shared_inner = take_shared_inner(saved.x.rows());
  backend_of(device).shared_backward({.options = shared->options(),
                                      .weights = weights.shared,
                                      .x = saved.x,
                                      .inner = *saved.shared_inner,
                                      .inner_rows = inner_rows,
                                      .d_y = d_y,
                                      .d_x = out.d_x,
                                      .gradients = out.gradients.shared,
                                      .mode = out.mode});
  clock.end("shared");
}

void MoeLayerData::note_waits() {
  const auto waited = comm.waited_for();
  stats.waited_for.clear();
  for (std::size_t r = 0; r < waited.size(); ++r) {
    stats.waited_for.push_back(
        std::chrono::duration<double>(waited[r] - waited_before_[r]).count());
  }
}

}  // namespace switchyard
