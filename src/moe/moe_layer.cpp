// The layer: which tensors go where, what is kept, and what happens when a rank cannot go on.
#include "switchyard/moe_layer.h"

#include <chrono>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/check_arguments.h"
#include "moe/check_tensors.h"
#include "moe/layer_stats.h"

namespace switchyard {
namespace {

DispatcherOptions dispatcher_options(const MoeLayerOptions& o) {
  return {
      .plan = {.hidden = o.hidden, .dtype = o.dtype, .alignment = o.alignment, .sizing = o.sizing},
      .mover = o.mover,
      .combine = o.combine};
}

void require_valid(const MoeLayerOptions& o, const ExpertPlacement& placement) {
  require(placement.num_experts() == o.router.num_experts,
          "the router has {} experts, but the placement {}", o.router.num_experts,
          placement.num_experts());
  require(o.shared_intermediate >= 0, "shared_intermediate ({}) must not be negative",
          o.shared_intermediate);
}

void require_tokens(const ConstTensorView& view, const Shape& shape, Dtype dtype,
                    std::string_view name) {
  require(view.dtype() == dtype && view.shape() == shape, "{} is {} {}, but must be {} {}", name,
          name_of(view.dtype()), view.shape().to_string(), name_of(dtype), shape.to_string());
}

// Stages read their input when earlier ones have begun to write the output.
void require_apart(const ConstTensorView& a, const ConstTensorView& b, std::string_view names) {
  const auto end_of = [](const ConstTensorView& view) {
    return view.rows() == 0 ? view.data() : view.row(view.rows() - 1) + view.row_bytes();
  };
  require(end_of(a) <= b.data() || end_of(b) <= a.data(), "{} must not share memory", names);
}

std::int64_t bytes_of(const std::optional<TensorView>& view) { return view ? view->bytes() : 0; }

}  // namespace

ExpertsOptions MoeLayerOptions::experts() const {
  return {.hidden = hidden,
          .intermediate = intermediate,
          .dtype = dtype,
          .activation = activation,
          .weight_stage = weight_stage,
          .clamp_limit = clamp_limit};
}

ExpertsOptions MoeLayerOptions::shared_expert() const {
  return {.hidden = hidden,
          .intermediate = shared_intermediate,
          .dtype = dtype,
          .activation = shared_activation,
          .clamp_limit = clamp_limit};
}

struct SavedForBackward::Data {
  const void* layer = nullptr;
  ConstTensorView x;
  Routing routing;
  Plan plan;
  std::optional<TensorView> rows = {};
  std::optional<TensorView> hidden = {};
  std::optional<TensorView> shared_hidden = {};
};

SavedForBackward::SavedForBackward() = default;
SavedForBackward::~SavedForBackward() = default;
SavedForBackward::SavedForBackward(SavedForBackward&&) noexcept = default;
SavedForBackward& SavedForBackward::operator=(SavedForBackward&&) noexcept = default;

std::int64_t SavedForBackward::bytes() const {
  if (data_ == nullptr) return 0;
  const Plan& plan = data_->plan;
  return data_->x.bytes() + data_->routing.expert_ids.bytes() + data_->routing.weights.bytes() +
         plan.slots().bytes() + plan.target_ranks().bytes() + plan.sources().bytes() +
         plan.source_offsets().bytes() + plan.row_offsets().bytes() + plan.group_rows().bytes() +
         bytes_of(data_->rows) + bytes_of(data_->hidden) + bytes_of(data_->shared_hidden);
}

const Plan& SavedForBackward::plan() const {
  require(data_ != nullptr, "nothing is saved: no training forward has filled this");
  return data_->plan;
}

const Routing& SavedForBackward::routing() const {
  require(data_ != nullptr, "nothing is saved: no training forward has filled this");
  return data_->routing;
}

struct MoeLayer::Data {
  Data(Communicator& the_comm, const ExpertPlacement& placement, const MoeLayerOptions& the_options,
       Device the_device)
      : comm(the_comm),
        options(the_options),
        device(std::move(the_device)),
        router(options.router, device),
        experts(options.experts(), device),
        dispatcher(comm, placement, dispatcher_options(options), device),
        num_local(placement.experts_of(comm.rank()).size()),
        expert_placement(placement) {
    if (options.shared_intermediate > 0) shared.emplace(options.shared_expert(), device);
  }

  bool weights_travel() const { return options.weight_stage != WeightStage::output; }
  TensorView take_rows(const Plan& plan, std::int64_t width) const {
    return device.backend().take({plan.row_capacity(), width}, options.dtype);
  }
  TensorView take_row_weights(const Plan& plan) const {
    return device.backend().take({plan.row_capacity()}, Dtype::f32);
  }

  void check_weights(const MoeWeights& weights) const;
  void check_gradients(const MoeWeights& weights, const MoeGradients& gradients) const;
  Routing route(const MoeWeights& weights, const LayerInput& in) const;
  void run_forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
                   std::unique_ptr<SavedForBackward::Data>* saved);
  void run_backward(const MoeWeights& weights, SavedForBackward::Data& saved,
                    const ConstTensorView& d_y, const LayerBackwardOutput& out);

  void note_waits() {
    const auto waited = comm.waited_for();
    stats.waited_for.clear();
    for (std::size_t r = 0; r < waited.size(); ++r) {
      stats.waited_for.push_back(
          std::chrono::duration<double>(waited[r] - waited_before[r]).count());
    }
  }

  // Runs what only this rank does. If it fails, the others must not wait for it.
  template <typename Body>
  void alone(std::string_view what, Body body) {
    try {
      body();
    } catch (const std::exception& error) {
      comm.abort(fmt::format("{}: {}", what, error.what()));
      throw;
    }
  }

  Communicator& comm;
  MoeLayerOptions options;
  Device device;
  Router router;
  Experts experts;
  std::optional<Experts> shared;
  Dispatcher dispatcher;
  std::size_t num_local;
  ExpertPlacement expert_placement;
  LayerStats stats;
  std::vector<std::chrono::nanoseconds> waited_before;  // as the last forward began
  PlanStatus status;
};

void MoeLayer::Data::check_weights(const MoeWeights& weights) const {
  router.check(weights.router, options.hidden);
  require(weights.experts.size() == num_local,
          "weights for {} experts were given, but rank {} owns {}", weights.experts.size(),
          comm.rank(), num_local);
  experts.check(weights.experts);
  require(shared.has_value() || !is_given(weights.shared.up),
          "weights of a shared expert were given, but shared_intermediate is 0");
  if (shared) shared->check({&weights.shared, 1});
}

void MoeLayer::Data::check_gradients(const MoeWeights& weights,
                                     const MoeGradients& gradients) const {
  require_gradient(gradients.router.gate, weights.router.gate, "gate");
  require_gradient(gradients.router.gate_bias, weights.router.gate_bias, "gate_bias");
  experts.check(weights.experts, gradients.experts);
  if (shared) shared->check({&weights.shared, 1}, {&gradients.shared, 1});
}

Routing MoeLayer::Data::route(const MoeWeights& weights, const LayerInput& in) const {
  return in.expert_ids ? router.replay(weights.router, in.x, *in.expert_ids)
                       : router.route(weights.router, in.x);
}

namespace {

// Picks that the plan refused are none.
void forget_refused_picks(const Plan& plan, Tensor& expert_ids) {
  const auto targets = plan.target_ranks().span<std::int32_t>();
  const auto ids = expert_ids.span<std::int32_t>();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (targets[i] < 0) ids[i] = -1;
  }
}

}  // namespace

void MoeLayer::Data::run_forward(const MoeWeights& weights, const LayerInput& in,
                                 const TensorView& y,
                                 std::unique_ptr<SavedForBackward::Data>* saved) {
  const auto bytes_before = dispatcher.bytes_on_wire();
  StageClock clock(stats.forward);
  stats.backward.clear();
  waited_before.assign(comm.waited_for().begin(), comm.waited_for().end());
  std::optional<Routing> routing;
  alone("route", [&] { routing = route(weights, in); });
  clock.end("route");
  const Plan plan = dispatcher.plan(routing->expert_ids, routing->first_non_finite_token);
  status = plan.status();
  if (status.bad_ids) {  // the other picks' weights are then those without the refused ones
    forget_refused_picks(plan, routing->expert_ids);
    alone("route", [&] { routing = router.replay(weights.router, in.x, routing->expert_ids); });
  }
  describe_plan(plan, stats);
  clock.end("plan");

  const bool keep_hidden = saved != nullptr && options.keep != Keep::nothing;
  const bool keep_rows = saved != nullptr && options.keep == Keep::rows && comm.size() > 1;
  const TensorView rows = take_rows(plan, options.hidden);
  const auto row_weights = weights_travel() ? std::optional(take_row_weights(plan)) : std::nullopt;
  dispatcher.dispatch(
      plan,
      {.x = in.x,
       .weights =
           weights_travel() ? std::optional<ConstTensorView>(routing->weights) : std::nullopt},
      {.rows = rows, .row_weights = row_weights});
  clock.end("dispatch");

  const auto spent = experts.seconds_spent();
  const auto hidden =
      keep_hidden ? std::optional(take_rows(plan, experts.options().hidden_width())) : std::nullopt;
  const TensorView results = keep_rows ? take_rows(plan, options.hidden) : rows;
  alone("experts", [&] {
    experts.forward(
        weights.experts, RowGroups::of(plan),
        {.rows = rows,
         .row_weights = row_weights ? std::optional<ConstTensorView>(*row_weights) : std::nullopt},
        {.out = results, .hidden = hidden});
  });
  clock.end_experts(spent, experts.seconds_spent());
  dispatcher.combine(
      plan,
      {.rows = results,
       .weights =
           weights_travel() ? std::nullopt : std::optional<ConstTensorView>(routing->weights)},
      y);
  clock.end("combine");
  std::optional<TensorView> shared_hidden;
  if (shared) {
    if (keep_hidden) {
      shared_hidden =
          device.backend().take({in.x.rows(), shared->options().hidden_width()}, options.dtype);
    }
    alone("shared expert", [&] {
      device.backend().shared_forward({.options = shared->options(),
                                       .weights = weights.shared,
                                       .x = in.x,
                                       .hidden = shared_hidden,
                                       .y = y});
    });
    clock.end("shared");
  }
  stats.bytes_on_wire = dispatcher.bytes_on_wire() - bytes_before;
  note_waits();
  if (saved == nullptr) return;
  *saved = std::make_unique<SavedForBackward::Data>(
      SavedForBackward::Data{.layer = this,
                             .x = in.x,
                             .routing = std::move(*routing),
                             .plan = plan,
                             .rows = keep_rows ? std::optional(rows) : std::nullopt,
                             .hidden = hidden,
                             .shared_hidden = shared_hidden});
}

void MoeLayer::Data::run_backward(const MoeWeights& weights, SavedForBackward::Data& saved,
                                  const ConstTensorView& d_y, const LayerBackwardOutput& out) {
  const auto bytes_before = dispatcher.bytes_on_wire();
  const Plan& plan = saved.plan;
  StageClock clock(stats.backward);
  // The gradient travels unweighted and its weights beside it: then the experts find the weights'
  // gradients without their outputs.
  const TensorView d_out = take_rows(plan, options.hidden);
  const TensorView row_weights = take_row_weights(plan);
  dispatcher.dispatch(plan, {.x = d_y, .weights = saved.routing.weights},
                      {.rows = d_out, .row_weights = row_weights});
  clock.end("combine_backward");
  if (!saved.rows) {
    saved.rows = take_rows(plan, options.hidden);
    dispatcher.dispatch(plan, {.x = saved.x}, {.rows = *saved.rows});
    clock.end("dispatch_again");
  }

  const auto spent = experts.seconds_spent();
  const bool kept_hidden = saved.hidden.has_value();
  if (!kept_hidden) saved.hidden = take_rows(plan, experts.options().hidden_width());
  const TensorView d_rows = take_rows(plan, options.hidden);
  const TensorView d_row_weights = take_row_weights(plan);
  alone("experts", [&] {
    experts.backward(weights.experts, RowGroups::of(plan),
                     {.rows = *saved.rows,
                      .row_weights = row_weights,
                      .hidden = *saved.hidden,
                      .hidden_rows = kept_hidden ? HiddenRows::kept : HiddenRows::to_be_computed,
                      .d_out = d_out},
                     {.d_rows = d_rows,
                      .d_row_weights = d_row_weights,
                      .gradients = out.gradients.experts,
                      .mode = out.mode});
  });
  clock.end_experts(spent, experts.seconds_spent());

  const TensorView d_weights =
      out.d_weights ? *out.d_weights
                    : device.backend().take(saved.routing.weights.shape(), Dtype::f32);
  dispatcher.dispatch_backward(plan, {.d_rows = d_rows, .d_row_weights = d_row_weights},
                               {.d_x = out.d_x, .d_weights = d_weights});
  clock.end("dispatch_backward");
  alone("router", [&] {
    router.backward(weights.router,
                    {.x = saved.x, .expert_ids = saved.routing.expert_ids, .d_weights = d_weights},
                    {.d_x = out.d_x, .gradients = out.gradients.router, .mode = out.mode});
  });
  clock.end("route_backward");
  if (shared) {
    const bool kept = saved.shared_hidden.has_value();
    if (!kept) {
      saved.shared_hidden =
          device.backend().take({saved.x.rows(), shared->options().hidden_width()}, options.dtype);
    }
    alone("shared expert", [&] {
      device.backend().shared_backward(
          {.options = shared->options(),
           .weights = weights.shared,
           .x = saved.x,
           .hidden = *saved.shared_hidden,
           .hidden_rows = kept ? HiddenRows::kept : HiddenRows::to_be_computed,
           .d_y = d_y,
           .d_x = out.d_x,
           .gradients = out.gradients.shared,
           .mode = out.mode});
    });
    clock.end("shared");
  }
  stats.bytes_on_wire += dispatcher.bytes_on_wire() - bytes_before;
  note_waits();
}

MoeLayer::MoeLayer(Communicator& comm, const ExpertPlacement& placement,
                   const MoeLayerOptions& options, Device device) {
  check_arguments("MoeLayer", {&comm}, [&] {
    require_valid(options, placement);
    const Router router(options.router);
    const Experts experts(options.experts());
  });
  data_ = std::make_unique<Data>(comm, placement, options, std::move(device));
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;

Tensor MoeLayer::forward(const MoeWeights& weights, const LayerInput& in) {
  Tensor y({in.x.rows(), data_->options.hidden}, data_->options.dtype);
  forward(weights, in, y, nullptr);
  return y;
}

Tensor MoeLayer::forward(const MoeWeights& weights, const LayerInput& in, SavedForBackward& saved) {
  Tensor y({in.x.rows(), data_->options.hidden}, data_->options.dtype);
  forward(weights, in, y, &saved);
  return y;
}

void MoeLayer::forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
                       SavedForBackward* saved) {
  check_arguments("MoeLayer::forward", {&data_->comm}, [&] {
    const Shape tokens{in.x.rows(), data_->options.hidden};
    require_tokens(in.x, tokens, data_->options.dtype, "x");
    require_tokens(y, tokens, data_->options.dtype, "y");
    require_apart(in.x, y, "x and y");
    if (in.expert_ids) {
      require_tokens(*in.expert_ids, {in.x.rows(), data_->options.router.top_k}, Dtype::i32,
                     "expert_ids");
    }
    data_->check_weights(weights);
  });
  data_->run_forward(weights, in, y, saved != nullptr ? &saved->data_ : nullptr);
}

void MoeLayer::backward(const MoeWeights& weights, SavedForBackward& saved,
                        const ConstTensorView& d_y, const LayerBackwardOutput& out) {
  check_arguments("MoeLayer::backward", {&data_->comm}, [&] {
    require(saved.data_ != nullptr,
            "nothing is saved: backward needs a training forward before "
            "it, and uses up what that left");
    require(saved.data_->layer == data_.get(), "what is saved was left by another layer");
    require_tokens(d_y, saved.data_->x.shape(), data_->options.dtype, "d_y");
    require_tokens(out.d_x, saved.data_->x.shape(), data_->options.dtype, "d_x");
    require_apart(d_y, out.d_x, "d_y and d_x");
    require_apart(saved.data_->x, out.d_x, "x and d_x");
    if (out.d_weights) {
      require_tokens(*out.d_weights, saved.data_->routing.weights.shape(), Dtype::f32, "d_weights");
    }
    data_->check_weights(weights);
    data_->check_gradients(weights, out.gradients);
  });
  const auto used_up = std::move(saved.data_);
  data_->run_backward(weights, *used_up, d_y, out);
}

const LayerStats& MoeLayer::stats() const { return data_->stats; }
const PlanStatus& MoeLayer::status() const { return data_->status; }
const MoeLayerOptions& MoeLayer::options() const { return data_->options; }
const ExpertPlacement& MoeLayer::placement() const { return data_->expert_placement; }
Communicator& MoeLayer::communicator() const { return data_->comm; }

}  // namespace switchyard
