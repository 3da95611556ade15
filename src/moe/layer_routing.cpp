// How a layer comes to its plan: padding, routing, capacity.
#include <cstring>

#include "core/padding.h"
#include "device/device_backend.h"
#include "moe/moe_layer_data.h"

namespace switchyard {
namespace {

// Picks that the plan refused are none.
void forget_refused_picks(const Plan& plan, const ConstTensorView& planned_ids,
                          Tensor& expert_ids) {
  const auto targets = plan.target_ranks().span<std::int32_t>();
  const auto planned = planned_ids.span<std::int32_t>();
  const auto ids = expert_ids.span<std::int32_t>();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (targets[i] < 0 && planned[i] != -1) ids[i] = -1;
  }
}

Tensor flat_copy(const ConstTensorView& mask) {
  Tensor copy(mask.shape(), mask.dtype());
  for (std::int64_t t = 0; t < mask.rows(); ++t) {
    std::memcpy(copy.view().row(t), mask.row(t), static_cast<std::size_t>(mask.row_bytes()));
  }
  return copy;
}

}  // namespace

TensorView MoeLayer::Data::without_padding(const ConstTensorView& rows,
                                           const ConstTensorView& valid) const {
  TensorView copy = device.backend().take(rows.shape(), rows.dtype());
  copy_kept_rows(rows, copy, [&](std::int64_t t) { return is_valid(valid, t); });
  return copy;
}

MoeLayer::Data::Routed MoeLayer::Data::route(const MoeWeights& weights, const LayerInput& in,
                                             Purpose purpose) {
  Routed routed{.x = in.x};
  if (in.valid) {
    routed.valid = flat_copy(*in.valid);
    routed.x = without_padding(in.x, *routed.valid);
  }
  const bool has_capacity = options.capacity.factor > 0.0;
  if (purpose == Purpose::training || has_capacity) routed.sums.emplace(make_sums(in, purpose));
  routed.routing = router.route(weights.router, {.x = routed.x,
                                                 .expert_ids = in.expert_ids,
                                                 .valid = routed.mask(),
                                                 .sums = routed.sums_or_null()});
  if (has_capacity) routed.kept_ids = within_capacity(routed.routing, *routed.sums);
  return routed;
}

// What is refused counts as no pick: the weights of the others are then those without it.
void MoeLayer::Data::forget_refused(const MoeWeights& weights, const Plan& plan, Routed& routed) {
  forget_refused_picks(plan, routed.planned_ids(), routed.routing.expert_ids);
  if (routed.sums) routed.sums->clear();
  routed.routing = router.route(weights.router, {.x = routed.x,
                                                 .expert_ids = routed.routing.expert_ids,
                                                 .valid = routed.mask(),
                                                 .sums = routed.sums_or_null()});
}

// Collective.
Plan MoeLayer::Data::make_plan(const Routed& routed) {
  try {
    return dispatcher.plan(routed.planned_ids(), routed.routing.first_non_finite_token);
  } catch (const InvalidArgument& error) {
    first_problem = error.what();
    throw;
  }
}

MoeLayer::Data::Step MoeLayer::Data::route_and_plan(const MoeWeights& weights, const LayerInput& in,
                                                    Purpose purpose, StageClock& clock) {
  const auto all = groups_of(purpose);
  Routed routed = or_abort(all, kForward, [&] { return route(weights, in, purpose); });
  clock.end("route");
  // All ranks of the experts' group have the same errors here; those of others may wait for them.
  const Plan plan = or_abort(other_groups_of(purpose), kForward, [&] { return make_plan(routed); });
  status = plan.status();
  note_status();
  describe_plan(plan, stats);
  if (status.bad_ids) or_abort(all, kForward, [&] { forget_refused(weights, plan, routed); });
  clock.end("plan");
  Step step{.layer = identity,
            .x = routed.x,
            .valid = std::move(routed.valid),
            .routing = std::move(routed.routing),
            .plan = plan};
  if (purpose == Purpose::training) {
    or_abort(all, kForward, [&] {
      weigh_losses(step, in, std::move(*routed.sums));
      scale_outputs(step);
    });
    if (has_losses() || options.gradient_scale != GradientScale::off) clock.end("losses");
  }
  return step;
}

}  // namespace switchyard
