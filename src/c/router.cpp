// SPDX-License-Identifier: Apache-2.0
// C interface: routers.
#include "switchyard/router.h"

#include <limits>

#include "c/handles.h"
#include "c/views.h"

namespace switchyard::c {

RouterOptions router_options(const switchyard_router_form& form) {
  const auto small = [](std::int64_t value, std::string_view name) {
    require(0 <= value && value <= std::numeric_limits<std::int32_t>::max(),
            "{} ({}) must not be negative", name, value);
    return static_cast<int>(value);
  };
  require(0 <= form.score_bias && form.score_bias <= 2, "there is no score_bias {}",
          form.score_bias);
  return {.num_experts = small(form.num_experts, "num_experts"),
          .top_k = form.top_k,
          .score = form.sigmoid != 0 ? ScoreFunction::sigmoid : ScoreFunction::softmax,
          .score_bias = static_cast<ScoreBias>(form.score_bias),
          .normalise = form.normalise != 0 ? Normalise::chosen : Normalise::none,
          .scale = static_cast<float>(form.scale),
          .num_expert_groups = small(form.num_expert_groups, "num_expert_groups"),
          .kept_expert_groups = small(form.kept_expert_groups, "kept_expert_groups")};
}

namespace {

struct RouterCall {
  RouterCall(const Device& device, const switchyard_router& args)
      : router(router_options(args.form), device),
        x(view_of(args.x, dtype_of(args.dtype), {args.num_tokens, args.hidden}, device, "x")),
        picks{args.num_tokens, args.form.top_k} {
    const Dtype dtype = dtype_of(args.gate_dtype);
    const Shape experts{args.form.num_experts};
    weights.gate = view_of(args.gate, dtype, {args.form.num_experts, args.hidden}, device, "gate");
    if (args.gate_bias != nullptr) {
      weights.gate_bias = view_of(args.gate_bias, dtype, experts, device, "gate_bias");
    }
    if (args.score_bias != nullptr) {
      weights.score_bias = view_of(args.score_bias, Dtype::f32, experts, device, "score_bias");
    }
  }

  Router router;
  RouterWeights weights;
  ConstTensorView x;
  Shape picks;
};

}  // namespace
}  // namespace switchyard::c

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::on_stream;

int switchyard_route(switchyard_device* device, void* stream, const switchyard_router* router,
                     void* expert_ids, void* pick_weights, void* first_non_finite) {
  return on_stream(device, stream, [&](const Device& on) {
    const c::RouterCall call(on, c::at(router, "router"));
    const Routing routing = call.router.route(call.weights, call.x);
    on.copy(routing.expert_ids, c::view_of(expert_ids, Dtype::i32, call.picks, on, "expert_ids"));
    on.copy(routing.weights, c::view_of(pick_weights, Dtype::f32, call.picks, on, "pick_weights"));
    on.copy(routing.problems.view().slice(0, 1),
            c::view_of(first_non_finite, Dtype::i64, {1}, on, "first_non_finite"));
  });
}

int switchyard_route_backward(switchyard_device* device, void* stream,
                              const switchyard_router* router,
                              const switchyard_router_gradients* gradients) {
  return on_stream(device, stream, [&](const Device& on) {
    const c::RouterCall call(on, c::at(router, "router"));
    const switchyard_router& args = *router;
    c::at(gradients, "gradients");
    RouterBackwardOutput out{
        .d_x = c::view_of(gradients->d_x, call.x.dtype(), call.x.shape(), on, "d_x"),
        .gradients = {.gate = c::view_of(gradients->d_gate, Dtype::f32,
                                         {args.form.num_experts, args.hidden}, on, "d_gate")}};
    if (gradients->d_gate_bias != nullptr) {
      out.gradients.gate_bias = c::view_of(gradients->d_gate_bias, Dtype::f32,
                                           {args.form.num_experts}, on, "d_gate_bias");
    }
    on.set_zero(out.d_x);  // the router accumulates into it
    call.router.backward(
        call.weights,
        {.x = call.x,
         .expert_ids = c::view_of(gradients->expert_ids, Dtype::i32, call.picks, on, "expert_ids"),
         .d_weights =
             c::view_of(gradients->d_pick_weights, Dtype::f32, call.picks, on, "d_pick_weights")},
        out);
  });
}
