// A layer whose steps are captured, and routings for its replays.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/random.h"
#include "switchyard/captured_graph.h"
#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing {

constexpr std::int64_t kTokens = 70;
constexpr int kExperts = 6;
constexpr std::int64_t kTopK = 2;

inline MoeLayerOptions graph_options(Dtype dtype, std::int64_t capacity) {
  return {.hidden = 64,
          .intermediate = 128,
          .router = RouterOptions::mixtral(kExperts, kTopK),
          .dtype = dtype,
          .shared_intermediate = 64,
          .losses = {.balance = BalanceLoss::batch, .z = true},
          .sizing = Sizing::bounded(capacity)};
}

// Ten routings, empty experts, everything to one expert and tokens without picks among them.
inline std::vector<Tensor> routings() {
  std::vector<Tensor> result;
  Random random(5);
  for (int i = 0; i < 6; ++i) {
    result.push_back(random.expert_ids({.num_tokens = kTokens,
                                        .top_k = kTopK,
                                        .num_experts = i % 2 == 0 ? kExperts : 3,
                                        .skew = 0.2 * i,
                                        .none = i == 5 ? 0.5 : 0.0}));
  }
  const auto filled = [&](const std::function<std::int32_t(std::int64_t, std::int64_t)>& id) {
    Tensor ids({kTokens, kTopK}, Dtype::i32);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t k = 0; k < kTopK; ++k) {
        ids.span<std::int32_t>()[static_cast<std::size_t>(t * kTopK + k)] = id(t, k);
      }
    }
    return ids;
  };
  result.push_back(filled([](auto, auto k) { return k == 0 ? 4 : -1; }));  // all to one
  result.push_back(filled([](auto, auto k) { return k == 0 ? 0 : 5; }));
  result.push_back(filled([](auto, auto) { return -1; }));  // none at all
  result.push_back(filled([](auto t, auto k) { return t < 3 ? static_cast<int>(2 * k) : -1; }));
  return result;
}

// Experts of bf16 without biases may read their rows from tokens; others have them dispatched.
inline Biases biases_of(Dtype dtype) { return dtype == Dtype::bf16 ? Biases::none : Biases::all; }

// A layer on a GPU with fixed tensors, as a graph needs them.
class LayerFixture {
 public:
  LayerFixture(Dtype dtype, std::int64_t capacity) : LayerFixture(graph_options(dtype, capacity)) {}
  explicit LayerFixture(const MoeLayerOptions& options,
                        const Device& on = Device::cuda(cuda_options()))
      : device(on),
        comm(connect()),
        placement(ExpertPlacement::contiguous(kExperts, 1)),
        layer(*comm, placement, options, device),
        weights(MoeParameters::random(options, placement, 0, 3, biases_of(options.dtype), device)),
        gradients(options, placement, 0, biases_of(options.dtype), device),
        x(device.empty({kTokens, 64}, options.dtype)),
        d_y(device.empty({kTokens, 64}, options.dtype)),
        y(device.empty({kTokens, 64}, options.dtype)),
        d_x(device.empty({kTokens, 64}, options.dtype)),
        d_weights(device.empty({kTokens, kTopK}, Dtype::f32)),
        ids(device.empty({kTokens, kTopK}, Dtype::i32)) {}

  void set(const Tensor& new_ids, std::uint64_t seed) {
    Random random(seed);
    device.copy(random.tensor({kTokens, 64}, x.dtype()), x);
    device.copy(random.tensor({kTokens, 64}, x.dtype()), d_y);
    device.copy(new_ids, ids);
  }
  void pad_every_third_token() {
    Tensor marks({kTokens}, Dtype::i32);
    for (std::size_t t = 0; t < std::size_t{kTokens}; ++t) {
      marks.span<std::int32_t>()[t] = t % 3 == 0 ? 0 : 1;
    }
    valid = device.copy_of(marks);
  }
  LayerInput input() const {
    LayerInput in{.x = x, .expert_ids = ids};
    if (valid) in.valid = *valid;
    if (layer.options().losses.balance == BalanceLoss::sequence) {
      in.sequence = SequenceShard(2, kTokens / 2, 1, 0);
    }
    return in;
  }
  void infer() { layer.forward(weights.weights(), input(), y, nullptr); }
  void forward(SavedForBackward& saved) { layer.forward(weights.weights(), input(), y, &saved); }
  void backward(SavedForBackward& saved) {
    layer.backward(weights.weights(), saved, {.d_y = d_y, .d_losses = {0.1F, 0.01F}},
                   {.d_x = d_x, .gradients = gradients.views(), .d_weights = d_weights});
  }
  void train() {
    SavedForBackward saved;
    forward(saved);
    backward(saved);
  }
  // A step with a replay between its forward and its backward.
  void train_around(const CapturedGraph& graph) {
    SavedForBackward saved;
    forward(saved);
    graph.replay();
    backward(saved);
  }
  // Everything that a step writes, on the host.
  std::vector<Tensor> results() {
    std::vector<Tensor> all;
    for (const Tensor* tensor : {&y, &d_x, &d_weights}) all.push_back(device.to_host(*tensor));
    MoeParameters host = gradients.copy_on(Device());
    const MoeGradients g = host.views();
    for (const auto& view : {g.router.gate, g.router.gate_bias, g.shared.up, g.shared.down}) {
      all.push_back(device.to_host(view));
    }
    for (const auto& e : g.experts) {
      for (const auto& view : {e.gate, e.up, e.down, e.gate_bias, e.up_bias, e.down_bias}) {
        all.push_back(device.to_host(view));
      }
    }
    return all;
  }

  Device device;
  std::unique_ptr<Communicator> comm;
  ExpertPlacement placement;
  MoeLayer layer;
  MoeParameters weights, gradients;
  Tensor x, d_y, y, d_x, d_weights, ids;
  std::optional<Tensor> valid;
};

inline void expect_same_tensors(const std::vector<Tensor>& actual,
                                const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t t = 0; t < actual.size(); ++t) {
    EXPECT_TRUE(same_bits(actual[t], expected[t])) << "tensor " << t;
  }
}

// Captures a step, and replays it with every routing beside a layer that runs it eagerly; `check`
// is called after each.
inline void expect_replays_equal_eager(LayerFixture& replayed, LayerFixture& eager,
                                       const std::function<void()>& check) {
  const auto all = routings();
  replayed.set(all[0], 1);
  replayed.train();
  const CapturedGraph graph(replayed.device, [&] { replayed.train(); });
  replayed.layer.take_pick_counts();
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    replayed.set(all[i], 10 + i);
    eager.set(all[i], 10 + i);
    graph.replay();
    eager.train();
    expect_same_tensors(replayed.results(), eager.results());
    EXPECT_EQ(replayed.layer.take_pick_counts().picks, eager.layer.take_pick_counts().picks);
    check();
  }
}

}  // namespace switchyard::testing
