// SPDX-License-Identifier: Apache-2.0
// Layers, their parameters, and steps over them.
#include <array>

#include "misuse/misuse.h"
#include "switchyard/moe_layer.h"

namespace switchyard::misuse {
namespace {

MoeLayerOptions options() {
  return {.hidden = 4, .intermediate = 3, .router = RouterOptions::mixtral(2, 1)};
}

// A rank alone, with two experts and three tokens.
struct Layer {
  std::unique_ptr<Communicator> comm = connect();
  ExpertPlacement placement = ExpertPlacement::contiguous(2, 1);
  MoeLayer layer{*comm, placement, options()};
  MoeParameters weights{options(), placement, 0};
  MoeParameters gradients{options(), placement, 0};
  Tensor x = floats({3, 4});
  Tensor y = floats({3, 4});
  SavedForBackward saved = {};

  void forward(const LayerInput& in) { (void)layer.forward(weights.weights(), in, saved); }
  void backward(const ConstTensorView& d_y, const TensorView& d_x) {
    layer.backward(weights.weights(), saved, d_y, {.d_x = d_x, .gradients = gradients.views()});
  }
};

std::function<void()> layer(const std::function<void(Layer&)>& call) {
  return [call] {
    Layer one;
    call(one);
  };
}

std::function<void()> gone(const std::function<void(Layer&)>& call) {
  return layer([call](Layer& one) {
    const MoeLayer taken = std::move(one.layer);
    call(one);
  });
}

std::function<void()> made_with(const std::function<void(MoeLayerOptions&)>& change) {
  return layer([change](Layer& one) {
    auto changed = options();
    change(changed);
    MoeLayer(*one.comm, one.placement, changed);
  });
}

constexpr auto kMovedFrom = "this layer was moved from";

}  // namespace

std::vector<Misuse> of_layers() {
  return {
      {"MoeLayer::MoeLayer(Communicator, ExpertPlacement, MoeLayerOptions, Device)",
       Kind::out_of_range, made_with([](auto& o) { o.hidden = -4; }), "hidden (-4)"},
      {"MoeLayer::MoeLayer(Communicator, ExpertPlacement, MoeLayerOptions, Device)", Kind::huge,
       made_with([](auto& o) { o.hidden = o.intermediate = kHuge; }), "1099511627776"},
      {"MoeLayer::MoeLayer(Communicator, ExpertPlacement, MoeLayerOptions, Device)", Kind::huge,
       made_with([](auto& o) { o.shared_intermediate = INT64_MAX; }), "9223372036854775807"},
      {"MoeLayer::MoeLayer(Communicator, ExpertPlacement, MoeLayerOptions, Device)", Kind::huge,
       made_with([](auto& o) { o.alignment = kHuge; }), "alignment (1099511627776)"},
      {"MoeLayer::MoeLayer(Communicator, ExpertPlacement, MoeLayerOptions, Device)", Kind::dtype,
       made_with([](auto& o) { o.dtype = Dtype::f16; }), "f16"},
      {"MoeLayer::MoeLayer(Communicator, ExpertPlacement, MoeLayerOptions, Device)",
       Kind::out_of_range,
       made_with([](auto& o) { o.sizing = Sizing::bounded(0, Overflow::fail, -1); }),
       "token_capacity (-1)"},
      {"MoeLayer::MoeLayer(LayerComms, ExpertPlacement, MoeLayerOptions, Device)", Kind::shape,
       layer([](auto& one) {
         MoeLayer(LayerComms{.experts = *one.comm}, ExpertPlacement::contiguous(3, 1), options());
       }),
       "the router has 2 experts, but the placement 3"},
      {"MoeLayer::MoeLayer(LayerComms, ExpertPlacement, MoeLayerOptions, Device)", Kind::shape,
       layer([](auto& one) {
         MoeLayer(LayerComms{.experts = *one.comm}, ExpertPlacement::contiguous(2, 2), options());
       }),
       "2"},
      {"MoeLayer::forward(MoeWeights, LayerInput)", Kind::shape, layer([](auto& one) {
         (void)one.layer.forward(one.weights.weights(), {.x = floats({3, 5})});
       }),
       "x is f32 [3,5]"},
      {"MoeLayer::forward(MoeWeights, LayerInput)", Kind::empty,
       layer([](auto& one) { (void)one.layer.forward({}, {.x = one.x}); }), "is missing"},
      {"MoeLayer::forward(MoeWeights, LayerInput)", Kind::moved_from,
       gone([](auto& one) { (void)one.layer.forward(one.weights.weights(), {.x = one.x}); }),
       kMovedFrom},
      {"MoeLayer::forward(MoeWeights, LayerInput, SavedForBackward)", Kind::device,
       layer([](auto& one) { one.forward({.x = on_a_gpu(one.x)}); }), "x [3,4] is in gpu memory"},
      {"MoeLayer::forward(MoeWeights, LayerInput, SavedForBackward)", Kind::out_of_range,
       layer([](auto& one) {
         one.forward({.x = one.x, .expert_ids = Tensor::from<std::int32_t>({3, 1}, {0, 8, 1})});
       }),
       "8"},
      {"MoeLayer::forward(MoeWeights, LayerInput, SavedForBackward)", Kind::dtype,
       layer([](auto& one) { one.forward({.x = one.x, .valid = floats({3})}); }),
       "valid is f32 [3]"},
      {"MoeLayer::forward(MoeWeights, LayerInput, TensorView, SavedForBackward*)",
       Kind::overlapping, layer([](auto& one) {
         one.layer.forward(one.weights.weights(), {.x = one.x}, one.x, nullptr);
       }),
       "x and y must not overlap"},
      {"MoeLayer::backward(MoeWeights, SavedForBackward, LayerBackwardInput, "
       "LayerBackwardOutput)",
       Kind::empty, layer([](auto& one) { one.backward(one.x, one.y); }),
       "SavedForBackward is empty"},
      {"MoeLayer::backward(MoeWeights, SavedForBackward, LayerBackwardInput, "
       "LayerBackwardOutput)",
       Kind::overlapping, layer([](auto& one) {
         one.forward({.x = one.x});
         one.backward(one.y, one.x);
       }),
       "x and d_x must not overlap"},
      {"MoeLayer::backward(MoeWeights, SavedForBackward, LayerBackwardInput, "
       "LayerBackwardOutput)",
       Kind::moved_from, layer([](auto& one) {
         one.forward({.x = one.x});
         const SavedForBackward taken = std::move(one.saved);
         one.backward(one.y, floats({3, 4}));
       }),
       "SavedForBackward is empty"},
      {"MoeLayer::commit_pick_counts(SavedForBackward)", Kind::empty,
       layer([](auto& one) { one.layer.commit_pick_counts(one.saved); }),
       "SavedForBackward is empty"},
      {"MoeLayer::commit_pick_counts(SavedForBackward)", Kind::out_of_range, layer([](auto& one) {
         one.forward({.x = one.x});
         MoeLayer(*one.comm, one.placement, options()).commit_pick_counts(one.saved);
       }),
       "another layer"},
      {"MoeLayer::pick_counts", Kind::moved_from,
       gone([](auto& one) { (void)one.layer.pick_counts(); }), kMovedFrom},
      {"MoeLayer::take_pick_counts", Kind::moved_from,
       gone([](auto& one) { (void)one.layer.take_pick_counts(); }), kMovedFrom},
      {"MoeLayer::stats", Kind::moved_from, gone([](auto& one) { (void)one.layer.stats(); }),
       kMovedFrom},
      {"MoeLayer::plan_status", Kind::moved_from,
       gone([](auto& one) { (void)one.layer.plan_status(); }), kMovedFrom},
      {"MoeLayer::check", Kind::moved_from, gone([](auto& one) { one.layer.check(); }), kMovedFrom},
      {"MoeLayer::options", Kind::moved_from, gone([](auto& one) { (void)one.layer.options(); }),
       kMovedFrom},
      {"MoeLayer::placement", Kind::moved_from,
       gone([](auto& one) { (void)one.layer.placement(); }), kMovedFrom},
      {"MoeLayer::communicator", Kind::moved_from,
       gone([](auto& one) { (void)one.layer.communicator(); }), kMovedFrom},
      {"SavedForBackward::plan", Kind::empty, [] { (void)SavedForBackward().plan(); },
       "SavedForBackward is empty"},
      {"SavedForBackward::routing", Kind::empty, [] { (void)SavedForBackward().routing(); },
       "SavedForBackward is empty"},
      {"SavedForBackward::losses", Kind::empty, [] { (void)SavedForBackward().losses(); },
       "SavedForBackward is empty"},
      {"run_step(span<MoeLayer*>, function)", Kind::null,
       [] {
         const std::array<MoeLayer*, 1> layers{nullptr};
         run_step(layers, [] {});
       },
       "layer 0 of 1 is null"},
      {"run_step(span<MoeLayer*>, function)", Kind::null, [] { run_step({}, nullptr); },
       "step is empty"},
      {"run_step(span<MoeLayer*>, function)", Kind::moved_from, gone([](auto& one) {
         const std::array<MoeLayer*, 1> layers{&one.layer};
         run_step(layers, [] {});
       }),
       kMovedFrom},

      {"MoeParameters::MoeParameters(MoeLayerOptions, ExpertPlacement, int, Biases, Device)",
       Kind::out_of_range, layer([](auto& one) { MoeParameters(options(), one.placement, 1); }),
       "rank (1)"},
      {"MoeParameters::MoeParameters(MoeLayerOptions, ExpertPlacement, int, Biases, Device)",
       Kind::huge, layer([](auto& one) {
         auto large = options();
         large.intermediate = INT64_MAX / 2 + 1;
         MoeParameters(large, one.placement, 0);
       }),
       "4611686018427387904"},
      {"MoeParameters::random(MoeLayerOptions, ExpertPlacement, int, size_t, Biases, Device)",
       Kind::dtype, layer([](auto& one) {
         auto whole = options();
         whole.dtype = Dtype::i64;
         (void)MoeParameters::random(whole, one.placement, 0, 1);
       }),
       "i64"},
      {"MoeParameters::of(MoeViews, Device)", Kind::device,
       [] {
         Tensor gate = floats({2, 4});
         (void)MoeParameters::of({.router = {.gate = on_a_gpu(gate)}});
       },
       "in gpu memory"},
  };
}

}  // namespace switchyard::misuse
