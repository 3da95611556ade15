// SPDX-License-Identifier: Apache-2.0
// C interface: experts, as whole layers over a plan or over rows alone.
#include "switchyard/experts.h"

#include <cmath>
#include <optional>
#include <vector>

#include "c/handles.h"
#include "c/views.h"

namespace switchyard::c {

ExpertsOptions experts_options(const switchyard_experts_form& form) {
  require(0 <= form.activation && form.activation < kNumActivations, "there is no activation {}",
          form.activation);
  return {.hidden = form.hidden,
          .intermediate = form.intermediate,
          .dtype = dtype_of(form.dtype),
          .activation = static_cast<Activation>(form.activation),
          .clamp_limit = static_cast<float>(form.clamp_limit),
          .gate_alpha = static_cast<float>(form.gate_alpha),
          .up_offset = static_cast<float>(form.up_offset)};
}

namespace {

auto unpacked(const ExpertsOptions& options, std::int64_t num_experts,
              const switchyard_experts& packed, const Device& device) {
  const auto inner = options.inner_width();
  PackedExpertViews views{
      .gate_up = view_of(packed.gate_up, options.dtype, {num_experts, inner, options.hidden},
                         device, "gate_up"),
      .down = view_of(packed.down, options.dtype,
                      {num_experts, options.hidden, options.intermediate}, device, "down")};
  require((packed.gate_up_bias == nullptr) == (packed.down_bias == nullptr),
          "gate_up_bias and down_bias go together");
  if (packed.gate_up_bias != nullptr) {
    views.gate_up_bias =
        view_of(packed.gate_up_bias, options.dtype, {num_experts, inner}, device, "gate_up_bias");
    views.down_bias = view_of(packed.down_bias, options.dtype, {num_experts, options.hidden},
                              device, "down_bias");
  }
  return views;
}

}  // namespace

std::vector<ExpertWeights> weights_of(const ExpertsOptions& options, std::int64_t num_experts,
                                      const switchyard_experts& packed, const Device& device) {
  const PackedExpertViews views = unpacked(options, num_experts, packed, device);
  return unpack(PackedExperts{.gate_up = views.gate_up,
                              .down = views.down,
                              .gate_up_bias = views.gate_up_bias,
                              .down_bias = views.down_bias},
                options.activation);
}

std::vector<ExpertGradients> gradients_of(const ExpertsOptions& options, std::int64_t num_experts,
                                          const switchyard_experts& packed, const Device& device) {
  if (packed.gate_up == nullptr) return {};
  return unpack(unpacked(options, num_experts, packed, device), options.activation);
}

namespace {

// The arguments of one call of a whole layer.
struct Moe {
  Moe(const Device& of_device, const switchyard_moe& args)
      : device(of_device),
        plan(plan_of(device, args.plan_form, args.plan)),
        experts(experts_options(args.form), device),
        weights(weights_of(experts.options(), args.plan_form.num_experts, args.weights, device)),
        num_rows(args.num_rows),
        x(tokens(args.x, "x")),
        pick_weights(picks(args.pick_weights, "pick_weights")) {
    require(num_rows >= 0 && num_rows <= plan.options().most_rows(),
            "num_rows ({}) must be 0 to {}", num_rows, plan.options().most_rows());
    if (args.inner != nullptr) inner = inner_rows(args.inner);
  }

  TensorView tokens(const void* data, std::string_view name) const {
    return view_of(const_cast<void*>(data), experts.options().dtype,
                   {plan.options().num_tokens, experts.options().hidden}, device, name);
  }
  TensorView picks(const void* data, std::string_view name) const {
    return view_of(const_cast<void*>(data), Dtype::f32,
                   {plan.options().num_tokens, plan.options().top_k}, device, name);
  }
  TensorView inner_rows(void* data) const {
    return view_of(data, experts.options().dtype, {num_rows, experts.options().inner_width()},
                   device, "inner");
  }
  Tensor take_rows() const {
    return device.empty({num_rows, experts.options().hidden}, experts.options().dtype);
  }
  TokenRows token_rows() const {
    return {.x = x,
            .row_sources = plan.row_sources().slice(0, num_rows),
            .top_k = plan.options().top_k};
  }

  void forward(const TensorView& y) const;
  void backward(const switchyard_moe_gradients& out) const;

  const Device& device;
  LocalPlan plan;
  Experts experts;
  std::vector<ExpertWeights> weights;
  std::int64_t num_rows;
  ConstTensorView x;
  ConstTensorView pick_weights;
  std::optional<TensorView> inner;
};

void Moe::forward(const TensorView& y) const {
  Tensor rows = take_rows();
  if (experts.reads_tokens()) {
    experts.forward(weights, plan.groups(), {.tokens = token_rows()},
                    {.out = rows, .inner = inner});
  } else {
    plan.dispatch({.x = x}, {.rows = rows});
    experts.forward(weights, plan.groups(), {.rows = rows}, {.out = rows, .inner = inner});
  }
  plan.combine({.rows = rows, .weights = pick_weights}, y);
}

void Moe::backward(const switchyard_moe_gradients& out) const {
  require(inner.has_value() || num_rows == 0, "backward needs inner, which was not given");
  const InnerRows inner_rows_hold =
      out.recompute != 0 ? InnerRows::to_be_computed : InnerRows::kept;
  const auto gradients =
      gradients_of(experts.options(), plan.options().num_experts, out.gradients, device);
  const ConstTensorView d_y = tokens(out.d_y, "d_y");
  const TensorView d_x = tokens(out.d_x, "d_x");
  const TensorView d_weights = picks(out.d_pick_weights, "d_pick_weights");
  const TensorView kept = inner ? *inner : inner_rows(nullptr);  // without inner, there are no rows
  Tensor d_rows = take_rows();
  if (experts.reads_tokens()) {
    device.set_zero(d_weights);  // picks without a row keep zero
    experts.backward(weights, plan.groups(),
                     {.row_weights = pick_weights,
                      .inner = kept,
                      .inner_rows = inner_rows_hold,
                      .d_out = d_y,
                      .tokens = token_rows()},
                     {.d_rows = d_rows, .d_row_weights = d_weights, .gradients = gradients});
    return plan.dispatch_backward({.d_rows = d_rows}, {.d_x = d_x});
  }
  Tensor rows = take_rows();
  Tensor d_out = take_rows();
  Tensor row_weights = device.empty({num_rows}, Dtype::f32);
  Tensor d_row_weights = device.empty({num_rows}, Dtype::f32);
  plan.dispatch({.x = x}, {.rows = rows});
  plan.dispatch({.x = d_y, .weights = pick_weights}, {.rows = d_out, .row_weights = row_weights});
  experts.backward(weights, plan.groups(),
                   {.rows = rows,
                    .row_weights = row_weights,
                    .inner = kept,
                    .inner_rows = inner_rows_hold,
                    .d_out = d_out},
                   {.d_rows = d_rows, .d_row_weights = d_row_weights, .gradients = gradients});
  plan.dispatch_backward({.d_rows = d_rows, .d_row_weights = d_row_weights},
                         {.d_x = d_x, .d_weights = d_weights});
}

}  // namespace
}  // namespace switchyard::c

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::on_stream;

int64_t switchyard_inner_width(const switchyard_experts_form* form) {
  std::int64_t width = -1;
  c::guarded([&] { width = c::experts_options(c::at(form, "form")).inner_width(); });
  return width;
}

int switchyard_moe_forward(switchyard_device* device, void* stream, const switchyard_moe* moe,
                           void* y) {
  return on_stream(device, stream, [&](const Device& on) {
    const c::Moe call(on, c::at(moe, "moe"));
    call.forward(call.tokens(y, "y"));
  });
}

int switchyard_moe_backward(switchyard_device* device, void* stream, const switchyard_moe* moe,
                            const switchyard_moe_gradients* gradients) {
  return on_stream(device, stream, [&](const Device& on) {
    c::Moe(on, c::at(moe, "moe")).backward(c::at(gradients, "gradients"));
  });
}

int switchyard_rows_forward(switchyard_device* device, void* stream, const switchyard_rows* rows,
                            void* out) {
  return on_stream(device, stream, [&](const Device& on) {
    const auto options = c::experts_options(c::at(rows, "rows").form);
    const Shape shape{rows->num_rows, options.hidden};
    ExpertsOutput output{.out = c::view_of(out, options.dtype, shape, on, "out")};
    if (rows->inner != nullptr) {
      output.inner = c::view_of(rows->inner, options.dtype, {rows->num_rows, options.inner_width()},
                                on, "inner");
    }
    Experts(options, on)
        .forward(c::weights_of(options, rows->plan_form.num_experts, rows->weights, on),
                 c::plan_of(on, rows->plan_form, rows->plan).groups(),
                 {.rows = c::view_of(rows->rows, options.dtype, shape, on, "rows")}, output);
  });
}

int switchyard_rows_backward(switchyard_device* device, void* stream, const switchyard_rows* rows,
                             const void* d_out, void* d_rows, const switchyard_experts* gradients,
                             int64_t recompute) {
  return on_stream(device, stream, [&](const Device& on) {
    const auto options = c::experts_options(c::at(rows, "rows").form);
    const auto num_experts = rows->plan_form.num_experts;
    const Shape shape{rows->num_rows, options.hidden};
    Experts(options, on)
        .backward(c::weights_of(options, num_experts, rows->weights, on),
                  c::plan_of(on, rows->plan_form, rows->plan).groups(),
                  {.rows = c::view_of(rows->rows, options.dtype, shape, on, "rows"),
                   .inner = c::view_of(rows->inner, options.dtype,
                                       {rows->num_rows, options.inner_width()}, on, "inner"),
                   .inner_rows = recompute != 0 ? InnerRows::to_be_computed : InnerRows::kept,
                   .d_out = c::view_of(d_out, options.dtype, shape, on, "d_out")},
                  {.d_rows = c::view_of(d_rows, options.dtype, shape, on, "d_rows"),
                   .gradients =
                       c::gradients_of(options, num_experts, c::at(gradients, "gradients"), on)});
  });
}
