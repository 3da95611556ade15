// SPDX-License-Identifier: Apache-2.0
#include "support/layer/two_layers.h"

#include "support/layer/layer_alone.h"

namespace switchyard::testing {

TwoLayers::TwoLayers(const LayerComms& groups, const std::array<Sizing, kLayers>& sizings,
                     MoverKind mover)
    : placement(ExpertPlacement::contiguous(6, groups.experts.size())) {
  for (std::size_t l = 0; l < kLayers; ++l) {
    auto options = small_layer_options();
    options.sizing = sizings.at(l);
    options.alignment = 4;
    options.mover = mover;
    options.losses = {.balance = BalanceLoss::batch, .z = true};
    Random random(l + 1);
    weights.push_back(
        part_of(random_layer(random, options, Biases::none), placement, groups.experts.rank()));
    gradients.push_back(gradients_for(weights.back()));
    layers.push_back(std::make_unique<MoeLayer>(groups, placement, options));
  }
}

void TwoLayers::step(const Tensor& x) {
  std::array<SavedForBackward, kLayers> saved;
  std::array<Tensor, kLayers> outputs;
  for (std::size_t l = 0; l < kLayers; ++l) {
    outputs.at(l) =
        layers[l]->forward(weights[l], {.x = l == 0 ? x : outputs.at(l - 1)}, saved.at(l));
    losses.at(l) = saved.at(l).losses();
  }
  Tensor d = outputs.back().clone();
  for (std::size_t l = kLayers; l-- > 0;) {
    Tensor d_in(x.shape(), Dtype::f32);
    layers[l]->backward(weights[l], saved.at(l),
                        {.d_y = d, .d_losses = {.balance = 0.1F, .z = 0.1F}},
                        {.d_x = d_in, .gradients = gradients[l]});
    d = std::move(d_in);
  }
  d_x = std::move(d);
  y = std::move(outputs.back());
}

std::vector<MoeLayer*> TwoLayers::all() const {
  std::vector<MoeLayer*> result;
  for (const auto& layer : layers) result.push_back(layer.get());
  return result;
}

bool TwoLayers::run(const Tensor& x) {
  return run_step(all(), [&] { step(x); });
}

Tensor tokens_of(int rank, std::int64_t count) {
  return Random(20 + static_cast<std::uint64_t>(rank)).tensor({count, 20}, Dtype::f32);
}

}  // namespace switchyard::testing
