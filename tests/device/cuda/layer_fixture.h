// SPDX-License-Identifier: Apache-2.0
// A layer whose steps are captured, on one rank or several, and routings for its replays.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "device/cuda/gpu_ranks.h"
#include "support/compare.h"
#include "support/random.h"
#include "switchyard/captured_graph.h"
#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing {

constexpr std::int64_t kTokens = 70;
constexpr int kExperts = 6;
constexpr std::int64_t kTopK = 2;

// Another number on every rank, all even; one has none.
inline std::int64_t tokens_of(int rank, int num_ranks) {
  constexpr std::array<std::int64_t, 4> kTokensOfRank{kTokens, 0, 34, 58};
  return num_ranks == 1 ? kTokens : kTokensOfRank[static_cast<std::size_t>(rank % 4)];
}
// The most that one rank can be sent.
inline std::int64_t rows_of(int num_ranks) {
  std::int64_t rows = 0;
  for (int r = 0; r < num_ranks; ++r) rows += tokens_of(r, num_ranks) * kTopK;
  return rows;
}

// Afterwards no rank's kernel waits for another rank, and so nobody waits who captures or frees.
inline void all_done(Communicator& comm, const Device& device) {
  device.synchronize();
  comm.barrier();
}

inline MoeLayerOptions graph_options(Dtype dtype, std::int64_t capacity) {
  return {.hidden = 64,
          .intermediate = 128,
          .router = RouterOptions::mixtral(kExperts, kTopK),
          .dtype = dtype,
          .shared_intermediate = 64,
          .losses = {.balance = BalanceLoss::batch, .z = true},
          .sizing = Sizing::bounded(capacity)};
}

// Ten routings, empty experts, everything to one expert or to the first rank, and tokens without
// picks among them.
inline std::vector<Tensor> routings(int rank = 0, int num_ranks = 1) {
  const std::int64_t num_tokens = tokens_of(rank, num_ranks);
  std::vector<Tensor> result;
  Random random(5 + static_cast<std::uint64_t>(rank));
  for (int i = 0; i < 6; ++i) {
    result.push_back(random.expert_ids({.num_tokens = num_tokens,
                                        .top_k = kTopK,
                                        .num_experts = i % 2 == 0 ? kExperts : 3,
                                        .skew = 0.2 * i,
                                        .none = i == 5 ? 0.5 : 0.0}));
  }
  const auto filled = [&](const std::function<std::int32_t(std::int64_t, std::int64_t)>& id) {
    Tensor ids({num_tokens, kTopK}, Dtype::i32);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int64_t k = 0; k < kTopK; ++k) {
        ids.span<std::int32_t>()[static_cast<std::size_t>(t * kTopK + k)] = id(t, k);
      }
    }
    return ids;
  };
  result.push_back(filled([](auto, auto k) { return k == 0 ? 4 : -1; }));  // all to one
  result.push_back(filled([](auto, auto k) { return k == 0 ? 0 : 1; }));   // of the first rank
  result.push_back(filled([](auto, auto) { return -1; }));                 // none at all
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
      : LayerFixture(options, on, std::shared_ptr<Communicator>(connect())) {}
  // Over the ranks of a communicator, which may be some of those of a batch.
  LayerFixture(const MoeLayerOptions& options, const Device& on, Communicator& over,
               Communicator* whole_batch = nullptr)
      : LayerFixture(options, on, std::shared_ptr<Communicator>(std::shared_ptr<void>(), &over),
                     whole_batch) {}

  // Other tokens on every rank.
  void set(const Tensor& new_ids, std::uint64_t seed) {
    Random random(seed + 1000 * static_cast<std::uint64_t>(comm->rank()));
    device.copy(random.tensor(x.shape(), x.dtype()), x);
    device.copy(random.tensor(x.shape(), x.dtype()), d_y);
    device.copy(new_ids, ids);
  }
  void pad_every_third_token() {
    Tensor marks({num_tokens}, Dtype::i32);
    for (std::size_t t = 0; t < static_cast<std::size_t>(num_tokens); ++t) {
      marks.span<std::int32_t>()[t] = t % 3 == 0 ? 0 : 1;
    }
    valid = device.copy_of(marks);
  }
  std::vector<Tensor> own_routings() const { return routings(comm->rank(), comm->size()); }
  void all_done() const { testing::all_done(batch != nullptr ? *batch : *comm, device); }
  LayerInput input() const {
    LayerInput in{.x = x, .expert_ids = ids};
    if (valid) in.valid = *valid;
    if (layer.options().losses.balance == BalanceLoss::sequence) {
      in.sequence = SequenceShard(2, num_tokens / 2, 1, 0);
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
  std::shared_ptr<Communicator> comm;
  Communicator* batch;  // null: the same
  std::int64_t num_tokens;
  ExpertPlacement placement;
  MoeLayer layer;
  MoeParameters weights, gradients;
  Tensor x, d_y, y, d_x, d_weights, ids;
  std::optional<Tensor> valid;

 private:
  LayerFixture(const MoeLayerOptions& options, const Device& on, std::shared_ptr<Communicator> over,
               Communicator* whole_batch = nullptr)
      : device(on),
        comm(std::move(over)),
        batch(whole_batch),
        num_tokens(tokens_of(comm->rank(), comm->size())),
        placement(ExpertPlacement::contiguous(kExperts, comm->size())),
        layer({.experts = *comm, .batch = batch}, placement, options, device),
        weights(MoeParameters::random(options, placement, comm->rank(), 3, biases_of(options.dtype),
                                      device)),
        gradients(options, placement, comm->rank(), biases_of(options.dtype), device),
        x(device.empty({num_tokens, options.hidden}, options.dtype)),
        d_y(device.empty(x.shape(), options.dtype)),
        y(device.empty(x.shape(), options.dtype)),
        d_x(device.empty(x.shape(), options.dtype)),
        d_weights(device.empty({num_tokens, kTopK}, Dtype::f32)),
        ids(device.empty({num_tokens, kTopK}, Dtype::i32)) {
    all_done();
  }
};

inline void expect_same_tensors(const std::vector<Tensor>& actual,
                                const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t t = 0; t < actual.size(); ++t) {
    EXPECT_TRUE(same_bits(actual[t], expected[t])) << "tensor " << t;
  }
}

// Captures a step, and replays it with every routing beside a layer that runs it eagerly; `check`
// is called after each. At several ranks all of them do.
inline void expect_replays_equal_eager(LayerFixture& replayed, LayerFixture& eager,
                                       const std::function<void()>& check) {
  const auto all = replayed.own_routings();
  replayed.set(all[0], 1);
  replayed.train();
  replayed.all_done();
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
  eager.all_done();
}

// The second layer reads what the first one made.
class TwoLayers {
 public:
  TwoLayers(const MoeLayerOptions& options, const Device& device, Communicator& comm)
      : first(options, device, comm), second(options, device, comm) {}

  void set(const Tensor& ids, std::uint64_t seed) {
    first.set(ids, seed);
    second.set(ids, seed + 1);
  }
  void train() {
    SavedForBackward saved_first;
    SavedForBackward saved_second;
    first.forward(saved_first);
    first.device.copy(first.y, second.x);
    second.forward(saved_second);
    second.backward(saved_second);
    first.device.copy(second.d_x, first.d_y);
    first.backward(saved_first);
  }

  LayerFixture first, second;
};

inline void expect_two_layers_equal_eager(const MoeLayerOptions& options, const Device& device,
                                          Communicator& comm) {
  TwoLayers replayed(options, device, comm);
  TwoLayers eager(options, device, comm);
  const auto all = replayed.first.own_routings();
  replayed.set(all[0], 1);
  replayed.train();
  replayed.first.all_done();
  const CapturedGraph graph(device, [&] { replayed.train(); });
  all_done(comm, device);
  for (std::size_t i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    replayed.set(all[2 * i + 1], 10 + i);
    eager.set(all[2 * i + 1], 10 + i);
    graph.replay();
    eager.train();
    expect_same_tensors(replayed.first.results(), eager.first.results());
    expect_same_tensors(replayed.second.results(), eager.second.results());
  }
  all_done(comm, device);
}

}  // namespace switchyard::testing
