// SPDX-License-Identifier: Apache-2.0
#include "support/training_step.h"

#include <bit>
#include <vector>

#include "switchyard/switchyard.h"

namespace switchyard::testing {
namespace {

constexpr std::int64_t kTokens = 12;
constexpr std::int64_t kHidden = 16;
constexpr int kExperts = 8;

MoeLayerOptions options_of(MoverKind mover) {
  return {.hidden = kHidden,
          .intermediate = 8,
          .router = RouterOptions::torchtitan(kExperts, 2),
          .losses = {.balance = BalanceLoss::batch},
          .mover = mover};
}

struct Model {
  MoeBlock block;
  std::vector<MoeBlock*> moe_blocks() { return {&block}; }
};

Model whole_model(MoverKind mover) {
  const auto whole = ExpertPlacement::contiguous(kExperts, 1);
  return {{.name = "layers.0.mlp",
           .parameters = MoeParameters::random(options_of(mover), whole, 0, 1),
           .placement = whole}};
}

Tensor tokens_of(int rank) {
  Tensor x({kTokens, kHidden}, Dtype::f32);
  std::uint32_t state = 1 + static_cast<std::uint32_t>(rank);
  for (float& value : x.span<float>()) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(state >> 8) * 0x1p-23F - 1.0F;
  }
  return x;
}

class Hash {
 public:
  void add(const ConstTensorView& values) {
    for (std::int64_t r = 0; r < values.rows(); ++r) {
      for (const float value : values.slice(r, r + 1).span<float>()) {
        hash_ = (hash_ ^ std::bit_cast<std::uint32_t>(value)) * 1099511628211U;
      }
    }
  }
  void add(const MoeGradients& gradients) {
    add(gradients.router.gate);
    for (const auto& expert : gradients.experts) {
      add(expert.gate);
      add(expert.up);
      add(expert.down);
    }
  }
  std::int64_t value() const { return static_cast<std::int64_t>(hash_); }

 private:
  std::uint64_t hash_ = 1469598103934665603U;
};

}  // namespace

std::int64_t train_a_step(Communicator& world, MoverKind mover,
                          const std::filesystem::path& checkpoint) {
  Mesh mesh(world, {{"dp", 2}, {"ep", world.size() / 2}});
  Model model = whole_model(mover);
  apply_expert_parallel(model, &mesh);
  MoeBlock& block = model.block;
  MoeLayer layer({.experts = *block.comm, .batch = &world}, block.placement, options_of(mover));
  MoeParameters gradients(options_of(mover), block.placement, block.rank());
  LoadBalancer balancer(kExperts);

  const Tensor x = tokens_of(world.rank());
  Tensor d_x(x.shape(), Dtype::f32);
  SavedForBackward saved;
  const Tensor y = layer.forward(block.parameters.weights(), {.x = x}, saved);
  layer.backward(block.parameters.weights(), saved, {.d_y = y, .d_losses = {.balance = 0.01F}},
                 {.d_x = d_x, .gradients = gradients.views()});
  reduce_gradients(gradients.views(), mesh);
  balancer.update(layer.take_pick_counts().picks, 0, block.parameters.views().router.score_bias);
  Tensor loss = Tensor::from<float>({1}, {y.span<float>()[0]});
  world.all_reduce(loss);
  world.broadcast(loss, world.size() - 1);

  save_checkpoint(
      world, checkpoint,
      {.blocks = {{"layers.0.mlp.", block.parameters.weights(), block.placement, block.rank()}}});
  Model loaded = whole_model(mover);
  load_block(Checkpoint::open(checkpoint), "layers.0.mlp.", loaded.block.placement, 0,
             loaded.block.parameters.views());
  world.barrier();

  Hash hash;
  hash.add(y);
  hash.add(d_x);
  hash.add(loss);
  hash.add(gradients.views());
  hash.add(loaded.block.parameters.views().router.gate);
  return hash.value();
}

}  // namespace switchyard::testing
