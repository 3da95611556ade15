// SPDX-License-Identifier: Apache-2.0
#include "switchyard/moe_parameters.h"

#include <cmath>
#include <initializer_list>
#include <optional>
#include <span>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/check_tensors.h"
#include "moe/expert_tensors.h"
#include "switchyard/moe_layer.h"

namespace switchyard {
namespace {

// SplitMix64: draws the same numbers on every machine.
class Draws {
 public:
  Draws(std::uint64_t seed, std::uint64_t stream) : state_(mixed(mixed(seed) + stream)) {}

  // Returns a number in [−1, 1).
  float next() {
    state_ += 0x9e3779b97f4a7c15U;
    return static_cast<float>(mixed(state_) >> 40) * 0x1p-23F - 1.0F;
  }

 private:
  static std::uint64_t mixed(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

void fill(const TensorView& view, Draws& draws, std::int64_t fan_in) {
  if (!is_given(view)) return;
  const float bound = 1.0F / std::sqrt(static_cast<float>(fan_in));
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    const auto row = view.slice(r, r + 1);
    if (view.dtype() == Dtype::f32) {
      for (float& v : row.span<float>()) v = bound * draws.next();
    } else {
      for (Bfloat16& v : row.span<Bfloat16>()) v = to_bfloat16(bound * draws.next());
    }
  }
}

void fill(const ExpertViews& expert, std::uint64_t seed, std::uint64_t id) {
  Draws draws(seed, id + 1);
  fill(expert.gate, draws, expert.up.shape()[1]);
  fill(expert.up, draws, expert.up.shape()[1]);
  fill(expert.down, draws, expert.down.shape()[1]);
  fill(expert.gate_bias, draws, expert.up.shape()[1]);
  fill(expert.up_bias, draws, expert.up.shape()[1]);
  fill(expert.down_bias, draws, expert.down.shape()[1]);
}

TensorView zeros(const Device& device, const Shape& shape, Dtype dtype) {
  if (device.memory() == Memory::host) return Tensor::zeros(shape, dtype);
  TensorView result = device.empty(shape, dtype);
  backend_of(device).set_zero(result);
  return result;
}

std::vector<ExpertViews> make_experts(const Device& device, const ExpertsOptions& options,
                                      std::int64_t count, Biases biases) {
  if (count == 0) return {};
  const auto width = options.inner_width();
  PackedExpertViews packed{
      .gate_up = zeros(device, {count, width, options.hidden}, options.dtype),
      .down = zeros(device, {count, options.hidden, options.intermediate}, options.dtype)};
  if (biases == Biases::all) {
    packed.gate_up_bias = zeros(device, {count, width}, options.dtype);
    packed.down_bias = zeros(device, {count, options.hidden}, options.dtype);
  }
  return unpack(packed, options.activation);
}

ExpertWeights as_weights(const ExpertViews& e) {
  ExpertWeights weights;
  const auto from = tensors_of(e);
  const auto to = tensors_in(weights);
  for (std::size_t t = 0; t < kNumExpertTensors; ++t) *to[t] = from[t];
  return weights;
}

MoeWeights as_weights(const MoeViews& views) {
  MoeWeights weights{.router = {views.router.gate, views.router.gate_bias, views.router.score_bias},
                     .shared = as_weights(views.shared)};
  for (const auto& expert : views.experts) weights.experts.push_back(as_weights(expert));
  return weights;
}

MoeViews make_zeros(const MoeLayerOptions& options, const ExpertPlacement& placement, int rank,
                    Biases biases, const Device& device) {
  require(options.hidden > 0 && options.intermediate > 0,
          "hidden ({}) and intermediate ({}) must be positive", options.hidden,
          options.intermediate);
  const Experts checked(options.experts(), device);
  require(0 <= rank && rank < placement.num_ranks(), "rank ({}) must be 0 to {}", rank,
          placement.num_ranks() - 1);
  MoeViews views;
  const auto experts = std::int64_t{placement.num_experts()};
  views.router.gate = zeros(device, {experts, options.hidden}, options.dtype);
  if (biases == Biases::all) views.router.gate_bias = zeros(device, {experts}, options.dtype);
  if (options.router.score_bias != ScoreBias::none) {
    views.router.score_bias = zeros(device, {experts}, Dtype::f32);
  }
  const auto local = static_cast<std::int64_t>(placement.experts_of(rank).size());
  views.experts = make_experts(device, options.experts(), local, biases);
  if (options.shared_intermediate > 0) {
    views.shared = make_experts(device, options.shared_expert(), 1, Biases::none).front();
  }
  return views;
}

// Tensors that follow each other in packed memory.
using Parts = std::vector<TensorView*>;

// Returns all tensors, grouped by kind.
std::vector<Parts> parts_of(MoeViews& tensors) {
  std::vector<Parts> result;
  const auto add = [&](std::initializer_list<TensorView ExpertViews::*> kinds,
                       std::span<ExpertViews> experts) {
    Parts parts;
    for (auto& expert : experts) {
      for (const auto kind : kinds) {
        if (is_given(expert.*kind)) parts.push_back(&(expert.*kind));
      }
    }
    if (!parts.empty()) result.push_back(std::move(parts));
  };
  for (const auto experts : {std::span(tensors.experts), std::span(&tensors.shared, 1)}) {
    add({&ExpertViews::gate, &ExpertViews::up}, experts);
    add({&ExpertViews::down}, experts);
    add({&ExpertViews::gate_bias, &ExpertViews::up_bias}, experts);
    add({&ExpertViews::down_bias}, experts);
  }
  auto& router = tensors.router;
  for (auto* view : {&router.gate, &router.gate_bias, &router.score_bias}) {
    if (is_given(*view)) result.push_back({view});
  }
  return result;
}

// Returns the parts as one view if they follow each other in memory.
std::optional<TensorView> joined(const Parts& parts) {
  const TensorView& first = *parts.front();
  std::int64_t rows = 0;
  for (const auto* part : parts) {
    const bool follows = part->data() == first.data() + rows * first.row_stride_bytes() &&
                         part->owner() == first.owner() && part->dtype() == first.dtype() &&
                         part->memory() == first.memory() &&
                         part->shape().with_rows(1) == first.shape().with_rows(1) &&
                         part->is_contiguous();
    if (!follows) return std::nullopt;
    rows += part->rows();
  }
  return TensorView(first.data(), first.dtype(), first.shape().with_rows(rows), first.row_stride(),
                    first.owner(), first.memory());
}

// Copies the parts into one new piece of the device's memory and makes them views of it. `mover`
// can reach both memories.
void move_to(const Device& mover, const Device& device, const Parts& parts) {
  const TensorView& first = *parts.front();
  std::int64_t rows = 0;
  for (const auto* part : parts) rows += part->rows();
  const Shape shape = first.shape().with_rows(rows);
  const TensorView all = device.memory() == Memory::host
                             ? Tensor(shape, first.dtype()).view()
                             : device.empty(shape, first.dtype()).view();
  const auto whole = joined(parts);
  if (whole) mover.copy(*whole, all);
  std::int64_t next = 0;
  for (auto* part : parts) {
    const TensorView copy = all.slice(next, next + part->rows());
    if (!whole) mover.copy(*part, copy);
    next += part->rows();
    *part = copy;
  }
}

}  // namespace

MoeParameters::MoeParameters(MoeViews views, Device device)
    : views_(std::move(views)), weights_(as_weights(views_)), device_(std::move(device)) {}

MoeParameters::MoeParameters(const MoeLayerOptions& options, const ExpertPlacement& placement,
                             int rank, Biases biases, const Device& device)
    : MoeParameters(make_zeros(options, placement, rank, biases, device), device) {}

MoeParameters MoeParameters::random(const MoeLayerOptions& options,
                                    const ExpertPlacement& placement, int rank, std::uint64_t seed,
                                    Biases biases, const Device& device) {
  MoeParameters result(options, placement, rank, biases);
  Draws draws(seed, 0);
  fill(result.views_.router.gate, draws, options.hidden);
  fill(result.views_.router.gate_bias, draws, options.hidden);
  const auto ids = placement.experts_of(rank);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    fill(result.views_.experts[i], seed, static_cast<std::uint64_t>(ids[i]));
  }
  if (options.shared_intermediate > 0) {
    fill(result.views_.shared, seed, static_cast<std::uint64_t>(placement.num_experts()));
  }
  if (device.memory() != Memory::host) return result.copy_on(device);
  result.device_ = device;
  return result;
}

MoeParameters MoeParameters::of(MoeViews tensors, const Device& device) {
  for (const auto& view : given_tensors(tensors)) {
    require_memory(view, device.memory(), "a tensor of the layer");
  }
  return {std::move(tensors), device};
}

MoeParameters MoeParameters::copy_on(const Device& device) const {
  const bool reaches = device_.memory() == Memory::host || device.memory() == Memory::host ||
                       &backend_of(device_) == &backend_of(device);
  require<Unsupported>(reaches,
                       "parameters cannot be copied directly from one GPU's device to another's: "
                       "copy them to the CPU first");
  MoeViews copy = views_;
  const Device& mover = device.memory() == Memory::host ? device_ : device;
  for (const auto& parts : parts_of(copy)) move_to(mover, device, parts);
  return {std::move(copy), device};
}

void MoeParameters::set_zero() {
  for (const auto& parts : parts_of(views_)) {
    if (const auto whole = joined(parts)) {
      backend_of(device_).set_zero(*whole);
    } else {
      for (const auto* part : parts) backend_of(device_).set_zero(*part);
    }
  }
}

}  // namespace switchyard
