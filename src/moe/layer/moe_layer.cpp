// SPDX-License-Identifier: Apache-2.0
// The public interface of the layer: options, checks, and the data saved between forward and
// backward.
#include "switchyard/moe_layer.h"

#include "comm/agreement.h"
#include "core/held.h"
#include "core/require.h"
#include "moe/check_tensors.h"
#include "moe/layer/moe_layer_data.h"
#include "moe/plan/plan_data.h"

namespace switchyard {
namespace {

DispatcherOptions dispatcher_options(const MoeLayerOptions& o) {
  return {
      .plan = {.hidden = o.hidden, .dtype = o.dtype, .alignment = o.alignment, .sizing = o.sizing},
      .mover = o.mover,
      .combine = o.combine};
}

std::int64_t bytes_of(const auto& tensor) { return tensor ? tensor->bytes() : 0; }

// At one rank these alias x, the weights and a table of the plan, which are already counted.
std::int64_t bytes_received(const Saved& saved) {
  if (!saved.received || saved.plan.placement().num_ranks() == 1) return 0;
  return saved.received->tokens.bytes() + saved.received->weights.bytes() +
         saved.received->row_sources.bytes();
}

const Saved& filled(const Saved* saved) {
  require(saved != nullptr, "SavedForBackward is empty: run a training forward first");
  return *saved;
}

}  // namespace

ExpertsOptions MoeLayerOptions::experts() const {
  return {.hidden = hidden,
          .intermediate = intermediate,
          .dtype = dtype,
          .activation = activation,
          .weight_stage = weight_stage,
          .clamp_limit = clamp_limit,
          .gate_alpha = gate_alpha,
          .up_offset = up_offset};
}

ExpertsOptions MoeLayerOptions::shared_expert() const {
  return {.hidden = hidden,
          .intermediate = shared_intermediate,
          .dtype = dtype,
          .activation = shared_activation,
          .clamp_limit = clamp_limit,
          .gate_alpha = gate_alpha,
          .up_offset = up_offset};
}

SavedForBackward::SavedForBackward() = default;
SavedForBackward::~SavedForBackward() = default;
SavedForBackward::SavedForBackward(SavedForBackward&&) noexcept = default;
SavedForBackward& SavedForBackward::operator=(SavedForBackward&&) noexcept = default;

std::int64_t SavedForBackward::bytes() const {
  if (data_ == nullptr) return 0;
  return data_->x.bytes() + data_->routing.expert_ids.bytes() + data_->routing.weights.bytes() +
         data_->routing.problems.bytes() + data_of(data_->plan).bytes() + bytes_of(data_->rows) +
         bytes_received(*data_) + bytes_of(data_->inner) + bytes_of(data_->shared_inner) +
         bytes_of(data_->valid) + bytes_of(data_->scaled_weights) + bytes_of(data_->output_scales) +
         (data_->sums ? bytes_of(*data_->sums) : 0) +
         (data_->loss_terms ? data_->loss_terms->bytes() : 0);
}

const Plan& SavedForBackward::plan() const { return filled(data_.get()).plan; }
const Routing& SavedForBackward::routing() const { return filled(data_.get()).routing; }
RouterLosses SavedForBackward::losses() const {
  const auto& terms = filled(data_.get()).loss_terms;
  return terms ? terms->values() : RouterLosses{};
}

MoeLayerData::MoeLayerData(const LayerComms& the_comms, const ExpertPlacement& the_placement,
                           const MoeLayerOptions& the_options, Device the_device)
    : comm(the_comms.experts),
      batch(the_comms.batch == nullptr ? comm : *the_comms.batch),
      sequence(the_comms.sequence),
      comms(distinct_comms(the_comms)),
      options(the_options),
      placement(the_placement),
      device(std::move(the_device)),
      router(options.router, device),
      experts(options.experts(), device),
      mover_kind(choose_mover(comm, dispatcher_options(options), device)),
      planner(comm, placement, dispatcher_options(options).plan, device, exchange_of(mover_kind)),
      mover(make_mover(mover_kind, comm, options.combine, planner, device)) {
  make_sums_over_ranks();
  if (options.shared_intermediate > 0) shared.emplace(options.shared_expert(), device);
  statistics = backend_of(device).take({options.router.num_experts + 1}, Dtype::i64);
  statistics_before = backend_of(device).take(statistics.shape(), Dtype::i64);
  backend_of(device).set_zero(statistics);
  if (options.gradient_scale != GradientScale::off) {
    const auto numbers = placement.owners();
    owners = device.copy_of(ConstTensorView(numbers.data(), {options.router.num_experts}));
  }
  if (device.memory() != Memory::host) {
    step_words = backend_of(device).take({kStepWords}, Dtype::i64);
    backend_of(device).set_zero(*step_words);
  }
}

Tensor MoeLayerData::take_output(const LayerInput& in, Purpose purpose) const {
  return or_abort(comms_of(purpose), kForward, [&] {
    return device.empty({in.x.rows(), options.hidden}, options.dtype);
  });
}

void MoeLayerData::check_weights(const MoeWeights& weights) const {
  const auto num_local = placement.experts_of(comm.rank()).size();
  require(weights.experts.size() == num_local,
          "weights for {} experts were given, but rank {} owns {}", weights.experts.size(),
          comm.rank(), num_local);
  experts.check(weights.experts);
  require(shared.has_value() || !is_given(weights.shared.up),
          "weights of a shared expert were given, but shared_intermediate is 0");
  if (shared) shared->check({&weights.shared, 1});
}

void MoeLayerData::check_gradients(const MoeWeights& weights, const MoeGradients& gradients) const {
  experts.check(weights.experts, gradients.experts);
  if (shared) shared->check({&weights.shared, 1}, {&gradients.shared, 1});
}

void MoeLayerData::check_router_gradients(const RouterWeights& weights,
                                          const RouterGradients& gradients) const {
  require_gradient(gradients.gate, weights.gate, "gate");
  require_gradient(gradients.gate_bias, weights.gate_bias, "gate_bias");
  require_memory_if_given(gradients.gate, device.memory(), "the gradient of gate");
  require_memory_if_given(gradients.gate_bias, device.memory(), "the gradient of gate_bias");
}

MoeLayer::MoeLayer(Communicator& comm, const ExpertPlacement& placement,
                   const MoeLayerOptions& options, Device device)
    : MoeLayer(LayerComms{.experts = comm}, placement, options, std::move(device)) {}

MoeLayer::MoeLayer(const LayerComms& comms, const ExpertPlacement& placement,
                   const MoeLayerOptions& options, Device device) {
  Communicator& all = comms.batch == nullptr ? comms.experts : *comms.batch;
  agree(all, "MoeLayer", [&] { require_valid(options, placement); });
  require_same_options(all, options, placement);
  // An error in the experts' group does not reach the ranks of the other groups by itself.
  auto others = distinct_comms(comms);
  others.erase(others.begin());
  or_abort(others, "MoeLayer", [&] {
    require_within_batch(comms);
    or_abort_alone({&comms.experts}, "MoeLayer", [&] {
      data_ = std::make_unique<MoeLayerData>(comms, placement, options, std::move(device));
    });
  });
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayerData& MoeLayer::data() const { return held(data_, "layer"); }

Tensor MoeLayer::forward(const MoeWeights& weights, const LayerInput& in) {
  Tensor y = data().take_output(in, MoeLayerData::Purpose::inference);
  forward(weights, in, y, nullptr);
  return y;
}

Tensor MoeLayer::forward(const MoeWeights& weights, const LayerInput& in, SavedForBackward& saved) {
  Tensor y = data().take_output(in, MoeLayerData::Purpose::training);
  forward(weights, in, y, &saved);
  return y;
}

void MoeLayer::forward(const MoeWeights& weights, const LayerInput& in, const TensorView& y,
                       SavedForBackward* saved) {
  const auto purpose =
      saved == nullptr ? MoeLayerData::Purpose::inference : MoeLayerData::Purpose::training;
  check_arguments(data().comms_of(purpose), kForward, [&] {
    const Memory memory = data().device.memory();
    require_x(in.x, data().options, memory);
    require_tokens(y, {in.x.shape(), data().options.dtype, memory}, "y");
    require_apart(in.x, y, "x and y");
    if (in.expert_ids) require_ids(in, data().options, memory);
    if (in.expert_weights) require_given_weights(in, data().options, memory);
    if (in.valid) require_tokens(*in.valid, {{in.x.rows()}, Dtype::i32, memory}, "valid");
    if (saved != nullptr && data().options.losses.balance == BalanceLoss::sequence) {
      require_sequence(in, data().sequence);
    }
    if (!in.expert_weights) data().router.check(weights.router, data().options.hidden);
    data().check_weights(weights);
  });
  auto left = data().forward(weights, in, y, purpose);
  if (saved == nullptr) return;
  saved->data_ = std::make_unique<Saved>(std::move(left));
}

void MoeLayer::backward(const MoeWeights& weights, SavedForBackward& saved,
                        const LayerBackwardInput& in, const LayerBackwardOutput& out) {
  check_arguments(data().comms, kBackward, [&] {
    require(saved.data_ != nullptr,
            "SavedForBackward is empty: each backward needs its own training forward");
    require(saved.data_->layer == data().identity, "SavedForBackward was filled by another layer");
    const auto& x = saved.data_->x;
    const Memory memory = data().device.memory();
    require_tokens(in.d_y, {x.shape(), data().options.dtype, memory}, "d_y");
    require_tokens(out.d_x, {x.shape(), data().options.dtype, memory}, "d_x");
    require_apart(in.d_y, out.d_x, "d_y and d_x");
    require_apart(x, out.d_x, "x and d_x");
    require_loss_gradients(in.d_losses, data().options.losses);
    if (out.d_weights) {
      require_tokens(*out.d_weights, {saved.data_->routing.weights.shape(), Dtype::f32, memory},
                     "d_weights");
      require(out.d_weights->is_contiguous(), "d_weights has row stride {}, but must be contiguous",
              out.d_weights->row_stride());
    }
    if (!saved.data_->is_routing_given) {
      data().router.check(weights.router, data().options.hidden);
      data().check_router_gradients(weights.router, out.gradients.router);
    }
    data().check_weights(weights);
    data().check_gradients(weights, out.gradients);
  });
  const auto used_up = std::move(saved.data_);
  data().backward(weights, *used_up, in, out);
}

void MoeLayer::commit_pick_counts(SavedForBackward& saved) {
  require(saved.data_ != nullptr,
          "SavedForBackward is empty: read statistics after a training forward and before its "
          "backward");
  require(saved.data_->layer == data().identity, "SavedForBackward was filled by another layer");
  data().commit(*saved.data_);
}

PickCounts MoeLayer::pick_counts() const { return data().read_pick_counts(); }
PickCounts MoeLayer::take_pick_counts() { return data().take_pick_counts(); }

LayerStats MoeLayer::stats() const { return data().read_stats(); }
PlanStatus MoeLayer::plan_status() const { return data().read_status(); }
void MoeLayer::check() const { check_status(data().read_status(), data().options.sizing); }
const MoeLayerOptions& MoeLayer::options() const { return data().options; }
const ExpertPlacement& MoeLayer::placement() const { return data().placement; }
Communicator& MoeLayer::communicator() const { return data().comm; }

}  // namespace switchyard
