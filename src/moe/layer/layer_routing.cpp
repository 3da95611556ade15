// SPDX-License-Identifier: Apache-2.0
// From a layer's input to its plan: padding, routing and capacity.
#include "moe/layer/moe_layer_data.h"
#include "moe/route.h"

namespace switchyard {

TensorView MoeLayerData::without_padding(const ConstTensorView& rows,
                                         const ConstTensorView& valid) const {
  TensorView copy = backend_of(device).take(rows.shape(), rows.dtype());
  backend_of(device).copy(rows, copy);
  backend_of(device).zero_padding(copy, valid);
  return copy;
}

MoeLayerData::Routed MoeLayerData::route(const MoeWeights& weights, const LayerInput& in,
                                         Purpose purpose) {
  Routed routed{.x = in.x};
  RouterInput router_in{.x = in.x, .bad_ids = BadIds::become_none};
  if (in.expert_ids) {
    router_in.expert_ids =
        narrowed_ids(device, *in.expert_ids, options.router.num_experts, options.sentinel_ids);
  }
  if (in.valid) {
    routed.valid = backend_of(device).take(in.valid->shape(), Dtype::i32);
    backend_of(device).copy(*in.valid, *routed.valid);
    router_in.x = routed.x = without_padding(in.x, *routed.valid);
    router_in.valid = *routed.valid;
  }
  const bool has_capacity = options.capacity.factor > 0.0;
  if (purpose == Purpose::training || has_capacity) routed.sums = make_sums(in, purpose);
  const RouterSums* sums = routed.sums ? &*routed.sums : nullptr;
  routed.routing = in.expert_weights
                       ? given_routing(device, options.router, router_in, *in.expert_weights, sums)
                       : switchyard::route(device, options.router, weights.router, router_in, sums);
  if (has_capacity) routed.kept_ids = within_capacity(routed.routing, *routed.sums);
  return routed;
}

// Collective.
Plan MoeLayerData::make_plan(const Routed& routed) {
  try {
    return mover->plan(planner, routed.planned_ids(),
                       {.of_router = {.words = routed.routing.problems}, .step = step_words});
  } catch (const InvalidArgument& error) {
    first_problem = error.what();
    throw;
  }
}

Saved MoeLayerData::route_and_plan(const MoeWeights& weights, const LayerInput& in, Purpose purpose,
                                   StageClock& clock) {
  const auto all = comms_of(purpose);
  Routed routed = or_abort(all, kForward, [&] { return route(weights, in, purpose); });
  clock.end("route");
  // Within the experts' group all ranks throw the same errors here, except for device errors. Ranks
  // of the other groups do not, and may be waiting for this one.
  const Plan plan = or_abort(other_comms_of(purpose), kForward, [&] {
    return or_abort_alone({&comm}, kForward, [&] { return make_plan(routed); });
  });
  note_plan(plan);
  clock.end("plan");
  Saved saved{.layer = identity,
              .x = routed.x,
              .valid = std::move(routed.valid),
              .routing = std::move(routed.routing),
              .is_routing_given = in.expert_weights.has_value(),
              .plan = plan};
  if (purpose == Purpose::training) {
    saved.sums = std::move(routed.sums);
    or_abort(all, kForward, [&] {
      weigh_losses(saved, in);
      scale_outputs(saved);
    });
    if (has_losses() || options.gradient_scale != GradientScale::off) clock.end("losses");
  }
  return saved;
}

}  // namespace switchyard
