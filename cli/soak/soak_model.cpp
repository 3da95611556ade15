// SPDX-License-Identifier: Apache-2.0
#include "soak/soak_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

Tensor random_tensor(Draw& draw, const Shape& shape, Dtype dtype) {
  Tensor result(shape, dtype);
  if (dtype == Dtype::bf16) {
    for (auto& v : result.span<Bfloat16>()) v = to_bfloat16(draw.signed_unit());
  } else {
    for (auto& v : result.span<float>()) v = draw.signed_unit();
  }
  return result;
}

// Returns distinct experts for every token; some are −1 if the layer drops ids.
Tensor random_ids(Draw& draw, const SoakLayer& layer, std::int64_t num_tokens) {
  const RouterOptions& router = layer.options.router;
  Tensor ids({num_tokens, router.top_k}, Dtype::i32);
  const auto all = ids.span<std::int32_t>();
  std::vector<std::int32_t> chosen;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i % static_cast<std::size_t>(router.top_k) == 0) chosen.clear();
    const double u = static_cast<double>(draw.below(1 << 20)) / (1 << 20);
    auto e = static_cast<std::int32_t>(std::pow(u, 1.0 + 6.0 * layer.skew) * router.num_experts);
    while (std::ranges::find(chosen, e) != chosen.end()) e = (e + 1) % router.num_experts;
    chosen.push_back(e);
    all[i] = layer.drops_ids && draw.one_in(5) ? -1 : e;
  }
  return ids;
}

Tensor copy_of(const ConstTensorView& view) {
  Tensor result(view.shape(), view.dtype());
  std::memcpy(result.data(), view.data(), static_cast<std::size_t>(view.bytes()));
  return result;
}

Sizing sizing_of(const SoakCase& c, const SoakLayer& layer) {
  if (c.room == Room::exact) return Sizing::exact();
  return Sizing::bounded(layer.capacity, c.room == Room::drop ? Overflow::drop : Overflow::fail);
}

}  // namespace

SoakInput make_input(const SoakCase& c, int step, std::size_t l, int group) {
  const SoakLayer& layer = c.layers[l];
  const auto by_rank = c.tokens_of_group(step, group);
  const auto num_tokens = std::accumulate(by_rank.begin(), by_rank.end(), std::int64_t{0});
  Draw draw(c.seed_for("input", step, l, group));
  const Shape tokens{num_tokens, layer.options.hidden};
  const Shape picks{num_tokens, layer.options.router.top_k};
  SoakInput in{.x = random_tensor(draw, tokens, layer.options.dtype),
               .d_y = random_tensor(draw, tokens, layer.options.dtype)};
  if (layer.source != PickSource::router) in.ids = random_ids(draw, layer, num_tokens);
  if (layer.source == PickSource::given_weights) {
    in.weights = random_tensor(draw, picks, Dtype::f32);
  }
  if (layer.has_padding) {
    in.valid = Tensor({num_tokens}, Dtype::i32);
    for (auto& v : in.valid->span<std::int32_t>()) v = draw.one_in(4) ? 0 : 1;
  }
  return in;
}

SoakInput slice_of(const SoakInput& whole, std::int64_t first, std::int64_t last) {
  const auto part = [&](const Tensor& t) { return copy_of(t.view().slice(first, last)); };
  SoakInput in{.x = part(whole.x), .d_y = part(whole.d_y)};
  if (whole.ids) in.ids = part(*whole.ids);
  if (whole.weights) in.weights = part(*whole.weights);
  if (whole.valid) in.valid = part(*whole.valid);
  return in;
}

// The tensors of one forward and backward of one layer, in device memory.
struct SoakModel::Pass {
  Tensor x, d_y;
  std::optional<Tensor> ids, weights, valid;
  Tensor y, d_x, d_weights;
  std::optional<MoeParameters> gradients;
  SavedForBackward saved;
  Tensor routed_ids, slots;  // in host memory
  RouterLosses losses;

  LayerInput input() const {
    LayerInput in{.x = x};
    if (ids) in.expert_ids = *ids;
    if (weights) in.expert_weights = *weights;
    if (valid) in.valid = *valid;
    return in;
  }
};

SoakModel::SoakModel(Communicator& comm, const SoakCase& c, Form form, const Device& device)
    : comm_(comm), case_(c), form_(form), device_(device) {
  for (std::size_t l = 0; l < c.layers.size(); ++l) {
    const SoakLayer& layer = c.layers[l];
    const auto placement = layer.placement(comm.size());
    weights_.push_back(MoeParameters::random(layer.options, placement, comm.rank(),
                                             c.seed_for("weights", 0, l), layer.biases, device));
    layers_.push_back(std::make_unique<MoeLayer>(comm, placement, options_of(layer), device));
  }
}

MoeLayerOptions SoakModel::options_of(const SoakLayer& layer) const {
  MoeLayerOptions options = layer.options;
  if (form_ == Form::as_drawn) {
    options.sizing = sizing_of(case_, layer);
  } else {
    options.alignment = 1;
    options.mover = MoverKind::automatic;
    options.combine = CombineMode::per_assignment;
    options.keep = Keep::rows;
  }
  return options;
}

std::vector<SoakModel::Pass> SoakModel::passes_for(const std::vector<SoakInput>& inputs) const {
  std::vector<Pass> passes(inputs.size());
  const auto upload = [&](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional(device_.copy_of(*tensor)) : std::nullopt;
  };
  for (std::size_t l = 0; l < inputs.size(); ++l) {
    const SoakLayer& layer = case_.layers[l];
    Pass& pass = passes[l];
    const auto num_tokens = inputs[l].x.rows();
    pass.x = device_.copy_of(inputs[l].x);
    pass.d_y = device_.copy_of(inputs[l].d_y);
    pass.ids = upload(inputs[l].ids);
    pass.weights = upload(inputs[l].weights);
    pass.valid = upload(inputs[l].valid);
    pass.d_x = device_.empty(inputs[l].x.shape(), layer.options.dtype);
    pass.d_weights = device_.empty({num_tokens, layer.options.router.top_k}, Dtype::f32);
    pass.gradients.emplace(layer.options, layers_[l]->placement(), comm_.rank(), layer.biases,
                           device_);
  }
  return passes;
}

void SoakModel::run(std::vector<Pass>& passes) {
  for (std::size_t l = 0; l < passes.size(); ++l) {
    Pass& pass = passes[l];
    pass.saved = {};
    pass.y = layers_[l]->forward(weights_[l].weights(), pass.input(), pass.saved);
  }
  for (std::size_t l = passes.size(); l-- > 0;) {
    Pass& pass = passes[l];
    pass.routed_ids = device_.to_host(pass.saved.routing().expert_ids);
    pass.slots = device_.to_host(pass.saved.plan().slots());
    pass.losses = pass.saved.losses();
    layers_[l]->backward(
        weights_[l].weights(), pass.saved, {.d_y = pass.d_y, .d_losses = case_.layers[l].d_losses},
        {.d_x = pass.d_x, .gradients = pass.gradients->views(), .d_weights = pass.d_weights});
  }
}

void SoakModel::collect(std::size_t l, Pass& pass, SoakResult& result) {
  MoeLayer& layer = *layers_[l];
  if (layer.options().sizing.is_bounded()) {
    result.status = layer.plan_status();
    try {
      layer.check();
    } catch (const InvalidArgument&) {
      result.is_refused = true;
    }
  } else {
    layer.check();
  }
  result.y = device_.to_host(pass.y);
  result.d_x = device_.to_host(pass.d_x);
  result.d_weights = device_.to_host(pass.d_weights);
  result.gradients = pass.gradients->copy_on(Device());
  result.ids = std::move(pass.routed_ids);
  result.slots = std::move(pass.slots);
  result.losses = pass.losses;
}

std::vector<SoakResult> SoakModel::step(const std::vector<SoakInput>& inputs) {
  auto passes = passes_for(inputs);
  if (form_ == Form::as_drawn && case_.room == Room::replay) {
    std::vector<MoeLayer*> layers;
    for (const auto& layer : layers_) layers.push_back(layer.get());
    run_step(layers, [&] { run(passes); });
  } else {
    run(passes);
  }
  std::vector<SoakResult> results(inputs.size());
  for (std::size_t l = 0; l < inputs.size(); ++l) collect(l, passes[l], results[l]);
  return results;
}

std::string SoakModel::error_of_forward(const SoakInput& input) {
  Pass pass;
  pass.x = device_.copy_of(input.x);
  if (input.ids) pass.ids = device_.copy_of(*input.ids);
  if (input.weights) pass.weights = device_.copy_of(*input.weights);
  try {
    layers_[0]->forward(weights_[0].weights(), pass.input(), pass.saved);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

MoeParameters whole_weights(const SoakCase& c, std::size_t l) {
  const SoakLayer& layer = c.layers[l];
  return MoeParameters::random(layer.options, layer.placement(1), 0, c.seed_for("weights", 0, l),
                               layer.biases);
}

}  // namespace switchyard::cli
