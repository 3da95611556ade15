// SPDX-License-Identifier: Apache-2.0
// Four ranks train one MoE layer to shift the elements of its input: forward, backward, and plain
// gradient descent on the weights that each rank holds.
#include <cstdio>

#include "switchyard/switchyard.h"

using namespace switchyard;

namespace {

constexpr std::int64_t kHidden = 16;
constexpr float kRate = 0.1F;

void descend(const TensorView& weights, const TensorView& gradients) {
  for (std::int64_t r = 0; r < weights.rows(); ++r) {
    const auto w = weights.slice(r, r + 1).span<float>();
    const auto d = gradients.slice(r, r + 1).span<float>();
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= kRate * d[i];
  }
}

void train(Communicator& comm) {
  const MoeLayerOptions options{
      .hidden = kHidden, .intermediate = 32, .router = RouterOptions::mixtral(8, 2)};
  const auto placement = ExpertPlacement::contiguous(8, comm.size());
  MoeLayer layer(comm, placement, options);
  auto weights = MoeParameters::random(options, placement, comm.rank(), 1);
  MoeParameters gradients(options, placement, comm.rank());

  // Every rank has different tokens. The target of element i is element i + 1, cyclically.
  Tensor x({64, kHidden}, Dtype::f32);
  std::uint32_t state = 1 + static_cast<std::uint32_t>(comm.rank());
  for (float& v : x.span<float>()) {
    state = state * 1664525U + 1013904223U;
    v = static_cast<float>(state >> 8) * 0x1p-23F - 1.0F;
  }
  const auto values = x.span<float>();
  Tensor d_x(x.shape(), Dtype::f32);
  Tensor d_y(x.shape(), Dtype::f32);
  const auto tokens = static_cast<float>(64 * comm.size());
  for (int step = 0; step <= 40; ++step) {
    SavedForBackward saved;
    const Tensor y = layer.forward(weights.weights(), {.x = x}, saved);
    Tensor loss = Tensor::zeros({1}, Dtype::f32);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t next = i % kHidden + 1 < kHidden ? i + 1 : i + 1 - kHidden;
      const float error = y.span<float>()[i] - values[next];
      loss.span<float>()[0] += error * error / tokens;
      d_y.span<float>()[i] = 2.0F * error / tokens * kHidden;
    }
    comm.all_reduce(loss);
    if (comm.rank() == 0 && step % 10 == 0) {
      std::printf("step %d: loss %.3f\n", step, static_cast<double>(loss.span<float>()[0]));
    }
    layer.backward(weights.weights(), saved, d_y, {.d_x = d_x, .gradients = gradients.views()});
    // Every rank holds the same router, so its gradients are summed. Each expert has one owner.
    comm.all_reduce(gradients.views().router.gate);
    descend(weights.views().router.gate, gradients.views().router.gate);
    for (std::size_t e = 0; e < gradients.views().experts.size(); ++e) {
      const ExpertViews& w = weights.views().experts[e];
      const ExpertGradients& d = gradients.views().experts[e];
      descend(w.gate, d.gate);
      descend(w.up, d.up);
      descend(w.down, d.down);
    }
  }
}

}  // namespace

int main() { run_ranks(4, train); }
