// SPDX-License-Identifier: Apache-2.0
// Captures a training step that never waits for the GPU into a CUDA graph, and replays it with new
// tokens. Without a GPU, prints the reason.
#include <cstdio>

#include "switchyard/switchyard.h"

using namespace switchyard;

namespace {

constexpr std::int64_t kTokens = 256;
constexpr std::int64_t kHidden = 128;

// Returns different tokens for every step.
Tensor tokens_of(int step) {
  Tensor x({kTokens, kHidden}, Dtype::bf16);
  unsigned state = 12345U + static_cast<unsigned>(step);
  for (auto& value : x.span<Bfloat16>()) {
    state = state * 1664525U + 1013904223U;
    value = to_bfloat16(static_cast<float>(state >> 8) * 0x1p-23F - 1.0F);
  }
  return x;
}

void train(const Device& device) {
  // With room for every pick and bounded sizing, the host need not know the routing.
  const MoeLayerOptions options{.hidden = kHidden,
                                .intermediate = 256,
                                .router = RouterOptions::mixtral(8, 2),
                                .dtype = Dtype::bf16,
                                .sizing = Sizing::bounded(kTokens * 2)};
  const auto comm = connect();  // one rank
  const auto placement = ExpertPlacement::contiguous(8, 1);
  MoeLayer layer(*comm, placement, options, device);
  const auto weights = MoeParameters::random(options, placement, 0, 1, Biases::none, device);
  MoeParameters gradients(options, placement, 0, Biases::none, device);
  Tensor x = device.empty({kTokens, kHidden}, Dtype::bf16);
  Tensor y = device.empty(x.shape(), x.dtype());
  Tensor d_x = device.empty(x.shape(), x.dtype());
  const auto step = [&] {
    SavedForBackward saved;
    layer.forward(weights.weights(), {.x = x}, y, &saved);
    layer.backward(weights.weights(), saved, y, {.d_x = d_x, .gradients = gradients.views()});
  };

  device.copy(tokens_of(0), x);
  step();  // runs once eagerly, to allocate the memory that the graph will use
  const CapturedGraph graph(device, step);
  const auto syncs = device.host_syncs();
  for (int i = 1; i <= 3; ++i) {
    device.copy(tokens_of(i), x);
    graph.replay();
    layer.check();  // waits, and throws if rows did not fit
    std::printf("replay %d: expert 0 got %lld rows\n", i,
                static_cast<long long>(layer.stats().rows_by_expert[0]));
  }
  std::printf("the host waited %lld times, for copies and reports alone\n",
              static_cast<long long>(device.host_syncs() - syncs));
}

}  // namespace

int main() {
  try {
    train(Device::cuda());
  } catch (const Unsupported& error) {
    std::printf("no GPU to run on: %s\n", error.what());
  }
}
