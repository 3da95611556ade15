// The layer's interface: options, checks, and what is handed on between forward and backward.
#include "switchyard/moe_layer.h"

#include <bit>

#include "core/require.h"
#include "moe/check_arguments.h"
#include "moe/check_tensors.h"
#include "moe/moe_layer_data.h"
#include "moe/plan_data.h"
#include "moe/plan_record.h"

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
  const Router router(o.router);
  const Experts experts(o.experts());
}

// Collective. What the dispatcher compares is not repeated here.
void require_same_options(Communicator& comm, const MoeLayerOptions& o) {
  const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
  const auto bits = [](float value) {
    return static_cast<std::int64_t>(std::bit_cast<std::int32_t>(value));
  };
  const RouterOptions& r = o.router;
  const std::vector<Field> fields{{"intermediate", o.intermediate},
                                  {"activation", number(o.activation)},
                                  {"weight_stage", number(o.weight_stage)},
                                  {"clamp_limit (its bits)", bits(o.clamp_limit)},
                                  {"shared_intermediate", o.shared_intermediate},
                                  {"shared_activation", number(o.shared_activation)},
                                  {"keep", number(o.keep)},
                                  {"top_k", r.top_k},
                                  {"the router's score", number(r.score)},
                                  {"score_bias", number(r.score_bias)},
                                  {"normalise", number(r.normalise)},
                                  {"the router's scale (its bits)", bits(r.scale)},
                                  {"num_groups", r.num_groups},
                                  {"kept_groups", r.kept_groups},
                                  {"choice", number(r.choice)}};
  require_equal_fields(fields, gather_fields(comm, fields));
}

void require_tokens(const ConstTensorView& view, const Shape& shape, Dtype dtype,
                    std::string_view name) {
  require(view.dtype() == dtype && view.shape() == shape, "{} is {} {}, but must be {} {}", name,
          name_of(view.dtype()), view.shape().to_string(), name_of(dtype), shape.to_string());
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

MoeLayer::Data::Data(Communicator& the_comm, const ExpertPlacement& the_placement,
                     const MoeLayerOptions& the_options, Device the_device)
    : comm(the_comm),
      options(the_options),
      placement(the_placement),
      device(std::move(the_device)),
      router(options.router, device),
      experts(options.experts(), device),
      dispatcher(comm, placement, dispatcher_options(options), device) {
  if (options.shared_intermediate > 0) shared.emplace(options.shared_expert(), device);
}

void MoeLayer::Data::check_weights(const MoeWeights& weights) const {
  router.check(weights.router, options.hidden);
  const auto num_local = placement.experts_of(comm.rank()).size();
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

MoeLayer::MoeLayer(Communicator& comm, const ExpertPlacement& placement,
                   const MoeLayerOptions& options, Device device) {
  check_together("MoeLayer", comm, [&] { require_valid(options, placement); });
  data_ = std::make_unique<Data>(comm, placement, options, std::move(device));
  require_same_options(comm, options);
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;

Tensor MoeLayer::forward(const MoeWeights& weights, const LayerInput& in) {
  Tensor y;
  data_->announced("MoeLayer::forward", [&] {
    y = Tensor({in.x.rows(), data_->options.hidden}, data_->options.dtype);
  });
  forward(weights, in, y, nullptr);
  return y;
}

Tensor MoeLayer::forward(const MoeWeights& weights, const LayerInput& in, SavedForBackward& saved) {
  Tensor y;
  data_->announced("MoeLayer::forward", [&] {
    y = Tensor({in.x.rows(), data_->options.hidden}, data_->options.dtype);
  });
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
  if (saved == nullptr) {
    data_->forward(weights, in, y, Data::Purpose::inference);
    return;
  }
  auto step = data_->forward(weights, in, y, Data::Purpose::training);
  saved->data_ = std::make_unique<SavedForBackward::Data>(std::move(step));
}

void MoeLayer::backward(const MoeWeights& weights, SavedForBackward& saved,
                        const ConstTensorView& d_y, const LayerBackwardOutput& out) {
  check_arguments("MoeLayer::backward", {&data_->comm}, [&] {
    require(saved.data_ != nullptr,
            "nothing is saved: backward needs a training forward before "
            "it, and uses up what that left");
    require(saved.data_->layer == data_->identity, "what is saved was left by another layer");
    const auto& x = saved.data_->x;
    require_tokens(d_y, x.shape(), data_->options.dtype, "d_y");
    require_tokens(out.d_x, x.shape(), data_->options.dtype, "d_x");
    require_apart(d_y, out.d_x, "d_y and d_x");
    require_apart(x, out.d_x, "x and d_x");
    if (out.d_weights) {
      require_tokens(*out.d_weights, saved.data_->routing.weights.shape(), Dtype::f32, "d_weights");
      require(out.d_weights->is_contiguous(), "d_weights has row stride {}, but must be contiguous",
              out.d_weights->row_stride());
    }
    data_->check_weights(weights);
    data_->check_gradients(weights, out.gradients);
  });
  const auto used_up = std::move(saved.data_);
  data_->backward(weights, *used_up, d_y, out);
}

const LayerStats& MoeLayer::stats() const { return data_->stats; }
const PlanStatus& MoeLayer::status() const { return data_->status; }
void MoeLayer::check() const { check_status(data_->status, data_->options.sizing); }
const MoeLayerOptions& MoeLayer::options() const { return data_->options; }
const ExpertPlacement& MoeLayer::placement() const { return data_->placement; }
Communicator& MoeLayer::communicator() const { return data_->comm; }

}  // namespace switchyard
