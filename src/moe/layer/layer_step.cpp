// One step of a layer, forward and backward: which tensors go where, and what is kept.
#include "moe/layer/moe_layer_data.h"

namespace switchyard {

TensorView MoeLayer::Data::take_rows(const Plan& plan, std::int64_t width) const {
  return device.backend().take({plan.row_capacity(), width}, options.dtype);
}
TensorView MoeLayer::Data::take_row_weights(const Plan& plan) const {
  return device.backend().take({plan.row_capacity()}, Dtype::f32);
}
TensorView MoeLayer::Data::take_shared_inner(std::int64_t num_tokens) const {
  return device.backend().take({num_tokens, shared->options().inner_width()}, options.dtype);
}

MoeLayer::Data::Step MoeLayer::Data::forward(const MoeWeights& weights, const LayerInput& in,
                                             const TensorView& y, Purpose purpose) {
  const auto bytes_before = dispatcher.bytes_on_wire();
  waited_before_.assign(comm.waited_for().begin(), comm.waited_for().end());
  stats.backward.clear();
  backward_timer_.reset();
  last_plan_.reset();  // their memory is this step's, so that a step always finds the same
  over_capacity_.reset();
  StageClock clock(device.backend(), stats.forward, forward_timer_);
  Step step = route_and_plan(weights, in, purpose, clock);
  or_abort(groups_of(purpose), kForward, [&] {
    forward_experts(weights, step, y, purpose, clock);
    if (shared) forward_shared(weights, step, y, purpose, clock);
  });
  stats.bytes_on_wire = dispatcher.bytes_on_wire() - bytes_before;
  note_waits();
  return step;
}

ExpertsInput MoeLayer::Data::bring_rows(const MoeWeights& weights, const Step& step,
                                        const TensorView& rows, StageClock& clock) {
  DispatchInput sent{.x = step.x};
  if (weights_travel()) sent.weights = step.weights();
  if (reads_tokens(weights)) return {.row_weights = sent.weights, .tokens = tokens_of(step)};
  ExpertsInput in{.rows = rows};
  DispatchOutput received{.rows = rows};
  if (weights_travel()) {
    received.row_weights = take_row_weights(step.plan);
    in.row_weights = *received.row_weights;
  }
  dispatcher.dispatch(step.plan, sent, received);
  clock.end("dispatch");
  return in;
}

void MoeLayer::Data::forward_experts(const MoeWeights& weights, Step& step, const TensorView& y,
                                     Purpose purpose, StageClock& clock) {
  const bool training = purpose == Purpose::training;
  const bool keep_rows = training && options.keep == Keep::rows && comm.size() > 1;
  const TensorView rows = take_rows(step.plan, options.hidden);
  const ExpertsInput in = bring_rows(weights, step, rows, clock);
  const auto spent = experts.seconds_spent();
  if (keep_rows) step.rows = rows;
  if (training && options.keep != Keep::nothing) {
    step.inner = take_rows(step.plan, experts.options().inner_width());
  }
  const TensorView results = keep_rows ? take_rows(step.plan, options.hidden) : rows;
  experts.forward(weights.experts, RowGroups::of(step.plan), in,
                  {.out = results, .inner = step.inner});
  clock.end_experts(spent, experts.seconds_spent());

  CombineInput returned{.rows = results};
  if (!weights_travel()) returned.weights = step.weights();
  dispatcher.combine(step.plan, returned, y);
  clock.end("combine");
}

void MoeLayer::Data::forward_shared(const MoeWeights& weights, Step& step, const TensorView& y,
                                    Purpose purpose, StageClock& clock) {
  if (purpose == Purpose::training && options.keep != Keep::nothing) {
    step.shared_inner = take_shared_inner(step.x.rows());
  }
  device.backend().shared_forward({.options = shared->options(),
                                   .weights = weights.shared,
                                   .x = step.x,
                                   .inner = step.shared_inner,
                                   .y = y});
  if (step.valid) device.backend().zero_padding(y, *step.valid);  // a bias is no zero
  clock.end("shared");
}

void MoeLayer::Data::backward(const MoeWeights& weights, Step& step, const LayerBackwardInput& in,
                              const LayerBackwardOutput& out) {
  const auto bytes_before = dispatcher.bytes_on_wire();
  StageClock clock(device.backend(), stats.backward, backward_timer_);
  or_abort(groups, kBackward, [&] {
    LayerBackwardOutput routed = out;
    if (!out.d_weights) {
      routed.d_weights = device.backend().take(step.routing.weights.shape(), Dtype::f32);
    }
    backward_experts(weights, step, in, routed, clock);
    backward_router(weights, step, in, routed, clock);
    if (shared) {
      const bool is_padded = step.valid.has_value();
      const ConstTensorView d_y = is_padded ? without_padding(in.d_y, *step.valid) : in.d_y;
      backward_shared(weights, step, d_y, out, clock);
    }
  });
  commit(step);
  stats.bytes_on_wire += dispatcher.bytes_on_wire() - bytes_before;
  note_waits();
}

ExpertsBackwardInput MoeLayer::Data::bring_gradients(const MoeWeights& weights, Step& step,
                                                     const ConstTensorView& d_y,
                                                     StageClock& clock) {
  const auto inner_rows = step.inner ? InnerRows::kept : InnerRows::to_be_computed;
  if (!step.inner) step.inner = take_rows(step.plan, experts.options().inner_width());
  // The gradient comes unweighted and its weights beside it: then the experts find the weights'
  // gradients without their outputs.
  ExpertsBackwardInput in{
      .row_weights = step.weights(), .inner = *step.inner, .inner_rows = inner_rows, .d_out = d_y};
  if (reads_tokens(weights)) {
    in.tokens = tokens_of(step);
    return in;
  }
  const TensorView d_out = take_rows(step.plan, options.hidden);
  const TensorView row_weights = take_row_weights(step.plan);
  dispatcher.dispatch(step.plan, {.x = d_y, .weights = step.weights()},
                      {.rows = d_out, .row_weights = row_weights});
  clock.end("combine_backward");
  if (!step.rows) {
    step.rows = take_rows(step.plan, options.hidden);
    dispatcher.dispatch(step.plan, {.x = step.x}, {.rows = *step.rows});
    clock.end("dispatch_again");
  }
  in.rows = *step.rows;
  in.row_weights = row_weights;
  in.d_out = d_out;
  return in;
}

void MoeLayer::Data::backward_experts(const MoeWeights& weights, Step& step,
                                      const LayerBackwardInput& in, const LayerBackwardOutput& out,
                                      StageClock& clock) {
  const ExpertsBackwardInput brought = bring_gradients(weights, step, in.d_y, clock);
  const auto spent = experts.seconds_spent();
  const TensorView d_rows = take_rows(step.plan, options.hidden);
  ExpertsBackwardOutput made{
      .d_rows = d_rows, .gradients = out.gradients.experts, .mode = out.mode};
  DispatchBackwardInput sent{.d_rows = d_rows};
  DispatchBackwardOutput received{.d_x = out.d_x};
  if (brought.tokens) {
    device.backend().set_zero(*out.d_weights);  // experts leave what has no row alone
    made.d_row_weights = out.d_weights;
  } else {
    made.d_row_weights = take_row_weights(step.plan);
    sent.d_row_weights = *made.d_row_weights;
    received.d_weights = out.d_weights;
  }
  experts.backward(weights.experts, RowGroups::of(step.plan), brought, made);
  clock.end_experts(spent, experts.seconds_spent());
  dispatcher.dispatch_backward(step.plan, sent, received);
  if (step.output_scales) {
    device.backend().scale_by_expert({.expert_ids = step.routing.expert_ids,
                                      .scales = *step.output_scales,
                                      .from = *out.d_weights,
                                      .to = *out.d_weights});
  }
  clock.end("dispatch_backward");
}

void MoeLayer::Data::backward_router(const MoeWeights& weights, const Step& step,
                                     const LayerBackwardInput& in, const LayerBackwardOutput& out,
                                     StageClock& clock) {
  RouterSlopes slopes;
  if (step.loss_terms) slopes = step.loss_terms->slopes(in.d_losses);
  router.backward(weights.router,
                  {.x = step.x,
                   .expert_ids = step.routing.expert_ids,
                   .d_weights = *out.d_weights,
                   .valid = step.mask(),
                   .slopes = &slopes},
                  {.d_x = out.d_x, .gradients = out.gradients.router, .mode = out.mode});
  clock.end("route_backward");
}

void MoeLayer::Data::backward_shared(const MoeWeights& weights, Step& step,
                                     const ConstTensorView& d_y, const LayerBackwardOutput& out,
                                     StageClock& clock) {
  const auto inner_rows = step.shared_inner ? InnerRows::kept : InnerRows::to_be_computed;
  if (!step.shared_inner) step.shared_inner = take_shared_inner(step.x.rows());
  device.backend().shared_backward({.options = shared->options(),
                                    .weights = weights.shared,
                                    .x = step.x,
                                    .inner = *step.shared_inner,
                                    .inner_rows = inner_rows,
                                    .d_y = d_y,
                                    .d_x = out.d_x,
                                    .gradients = out.gradients.shared,
                                    .mode = out.mode});
  clock.end("shared");
}

void MoeLayer::Data::note_waits() {
  const auto waited = comm.waited_for();
  stats.waited_for.clear();
  for (std::size_t r = 0; r < waited.size(); ++r) {
    stats.waited_for.push_back(
        std::chrono::duration<double>(waited[r] - waited_before_[r]).count());
  }
}

}  // namespace switchyard
