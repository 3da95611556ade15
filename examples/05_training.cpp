// SPDX-License-Identifier: Apache-2.0
// Shows what a training engine needs around the layer. Four ranks train a layer as dp = 2 × ep = 2,
// with bounded buffers, a balance loss and loss-free balancing, and save it. Then they continue
// training it, and also continue from the checkpoint as ep = 4. Both give the same loss.
#include <cstdio>
#include <filesystem>

#include "switchyard/switchyard.h"

using namespace switchyard;

namespace {

constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kTokens = 64;  // per rank
constexpr float kRate = 3.0F;

MoeLayerOptions layer_options() {
  return {.hidden = kHidden,
          .intermediate = 32,
          .router = RouterOptions::torchtitan(8, 2),  // its choice uses a score bias
          .losses = {.balance = BalanceLoss::batch},
          .sizing = Sizing::bounded(16)};  // too few: the first step is repeated
}

struct Model {
  MoeBlock block;
  std::vector<MoeBlock*> moe_blocks() { return {&block}; }
};

// Returns the undivided model, the same on every rank.
Model whole_model() {
  const auto whole = ExpertPlacement::contiguous(8, 1);
  return {{.name = "layers.0.mlp",
           .parameters = MoeParameters::random(layer_options(), whole, 0, 1),
           .placement = whole}};
}

// Returns this rank's tokens of the global batch.
Tensor tokens_of(int rank) {
  Tensor x({kTokens, kHidden}, Dtype::f32);
  std::uint32_t state = 1 + static_cast<std::uint32_t>(rank);
  for (float& v : x.span<float>()) {
    state = state * 1664525U + 1013904223U;
    v = static_cast<float>(state >> 8) * 0x1p-23F - 1.0F;
  }
  return x;
}

void descend(const TensorView& weights, const TensorView& gradients) {
  for (std::int64_t r = 0; r < weights.rows(); ++r) {
    const auto w = weights.slice(r, r + 1).span<float>();
    const auto d = gradients.slice(r, r + 1).span<float>();
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= kRate * d[i];
  }
}

void descend(const MoeViews& weights, const MoeGradients& gradients) {
  descend(weights.router.gate, gradients.router.gate);
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    descend(weights.experts[e].gate, gradients.experts[e].gate);
    descend(weights.experts[e].up, gradients.experts[e].up);
    descend(weights.experts[e].down, gradients.experts[e].down);
  }
}

// Returns this rank's part of the loss, half the squared error of y − x averaged over the tokens of
// all ranks, and stores its gradient in d_y.
float loss_of(const Tensor& y, const Tensor& x, int num_ranks, Tensor& d_y) {
  const auto scale = 1.0F / static_cast<float>(kTokens * num_ranks);
  float loss = 0.0F;
  for (std::size_t i = 0; i < y.span<float>().size(); ++i) {
    const float error = y.span<float>()[i] - x.span<float>()[i];
    loss += 0.5F * scale * error * error;
    d_y.span<float>()[i] = scale * error;
  }
  return loss;
}

void train(Mesh& mesh, Model& model, int first_step, int last_step) {
  Communicator& world = mesh.world();
  MoeBlock& block = model.block;
  MoeLayer layer({.experts = *block.comm, .batch = &world}, block.placement, layer_options());
  LoadBalancer balancer(8);
  MoeParameters gradients(layer_options(), block.placement, block.rank());
  const Tensor x = tokens_of(world.rank());
  Tensor d_x(x.shape(), Dtype::f32);
  Tensor d_y(x.shape(), Dtype::f32);
  const std::vector<MoeLayer*> layers{&layer};
  for (int step = first_step; step <= last_step; ++step) {
    Tensor loss({1}, Dtype::f32);
    const bool ran_again = run_step(layers, [&] {
      SavedForBackward saved;
      const Tensor y = layer.forward(block.parameters.weights(), {.x = x}, saved);
      loss.span<float>()[0] = loss_of(y, x, world.size(), d_y);
      layer.backward(block.parameters.weights(), saved,
                     {.d_y = d_y, .d_losses = {.balance = 0.01F}},
                     {.d_x = d_x, .gradients = gradients.views()});
    });
    reduce_gradients(gradients.views(), mesh);
    descend(block.parameters.views(), gradients.views());
    balancer.update(layer.take_pick_counts().picks, step,
                    block.parameters.views().router.score_bias);
    world.all_reduce(loss);
    if (world.rank() == 0 && step % 10 == 0) {
      std::printf("ep %d, step %d: loss %.4f%s\n", mesh.size("ep"), step,
                  static_cast<double>(loss.span<float>()[0]), ran_again ? ", run again" : "");
    }
  }
}

}  // namespace

int main() {
  const auto path = std::filesystem::temp_directory_path() / "switchyard-05.safetensors";
  run_ranks(4, [&](Communicator& world) {
    Mesh two(world, {{"dp", 2}, {"ep", 2}});
    Model model = whole_model();
    apply_expert_parallel(model, &two);
    train(two, model, 0, 20);
    const MoeBlock& block = model.block;
    save_checkpoint(
        world, path,
        {.blocks = {{"layers.0.mlp.", block.parameters.weights(), block.placement, block.rank()}}});

    Mesh four(world, {{"dp", 1}, {"ep", 4}});
    Model loaded = whole_model();
    load_block(Checkpoint::open(path), "layers.0.mlp.", loaded.block.placement, 0,
               loaded.block.parameters.views());
    apply_expert_parallel(loaded, &four);
    train(two, model, 21, 40);
    train(four, loaded, 21, 40);
  });
  std::filesystem::remove(path);
}
