// A whole layer in one CUDA graph: captured once, replayed with other routings.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/captured_graph.h"
#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::cuda_graph_test {
namespace {

constexpr std::int64_t kTokens = 70;
constexpr int kExperts = 6;
constexpr std::int64_t kTopK = 2;

MoeLayerOptions options_of(Dtype dtype, std::int64_t capacity) {
  return {.hidden = 64,
          .intermediate = 128,
          .router = RouterOptions::mixtral(kExperts, kTopK),
          .dtype = dtype,
          .shared_intermediate = 64,
          .losses = {.balance = BalanceLoss::batch, .z = true},
          .sizing = Sizing::bounded(capacity)};
}

// Ten routings, empty experts, everything to one expert and tokens without picks among them.
std::vector<Tensor> routings() {
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
Biases biases_of(Dtype dtype) { return dtype == Dtype::bf16 ? Biases::none : Biases::all; }

// A layer on a GPU with fixed tensors, as a graph needs them.
class Fixture {
 public:
  Fixture(Dtype dtype, std::int64_t capacity)
      : comm(connect()),
        placement(ExpertPlacement::contiguous(kExperts, 1)),
        layer(*comm, placement, options_of(dtype, capacity), device),
        weights(MoeParameters::random(layer.options(), placement, 0, 3, biases_of(dtype), device)),
        gradients(layer.options(), placement, 0, biases_of(dtype), device),
        x(device.empty({kTokens, 64}, dtype)),
        d_y(device.empty({kTokens, 64}, dtype)),
        y(device.empty({kTokens, 64}, dtype)),
        d_x(device.empty({kTokens, 64}, dtype)),
        d_weights(device.empty({kTokens, kTopK}, Dtype::f32)),
        ids(device.empty({kTokens, kTopK}, Dtype::i32)) {}

  void set(const Tensor& new_ids, std::uint64_t seed) {
    Random random(seed);
    device.copy(random.tensor({kTokens, 64}, x.dtype()), x);
    device.copy(random.tensor({kTokens, 64}, x.dtype()), d_y);
    device.copy(new_ids, ids);
  }
  void infer() { layer.forward(weights.weights(), {.x = x, .expert_ids = ids}, y, nullptr); }
  void train() {
    SavedForBackward saved;
    layer.forward(weights.weights(), {.x = x, .expert_ids = ids}, y, &saved);
    layer.backward(weights.weights(), saved, {.d_y = d_y, .d_losses = {0.1F, 0.01F}},
                   {.d_x = d_x, .gradients = gradients.views(), .d_weights = d_weights});
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

  Device device = Device::cuda(cuda_options());
  std::unique_ptr<Communicator> comm;
  ExpertPlacement placement;
  MoeLayer layer;
  MoeParameters weights, gradients;
  Tensor x, d_y, y, d_x, d_weights, ids;
};

// Whether a message has the words.
template <typename Error>
void expect_error(const std::function<void()>& call, std::string_view words) {
  const auto message = error_of<Error>(call);
  EXPECT_NE(message.find(words), std::string::npos) << message;
}

class CudaGraphTest : public ::testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_P(CudaGraphTest, ForwardReplayedWithOtherRoutingsEqualsEager) {
  Fixture replayed(GetParam(), kTokens * kTopK);
  Fixture eager(GetParam(), kTokens * kTopK);
  const auto all = routings();
  replayed.set(all[0], 1);
  replayed.infer();
  const CapturedGraph graph(replayed.device, [&] { replayed.infer(); });
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    replayed.set(all[i], 10 + i);
    eager.set(all[i], 10 + i);
    graph.replay();
    eager.infer();
    EXPECT_TRUE(same_bits(replayed.device.to_host(replayed.y), eager.device.to_host(eager.y)));
  }
}

TEST_P(CudaGraphTest, ForwardAndBackwardReplayedWithOtherRoutingsEqualEager) {
  Fixture replayed(GetParam(), kTokens * kTopK);
  Fixture eager(GetParam(), kTokens * kTopK);
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
    const auto actual = replayed.results();
    const auto expected = eager.results();
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t t = 0; t < actual.size(); ++t) {
      EXPECT_TRUE(same_bits(actual[t], expected[t])) << "tensor " << t;
    }
    EXPECT_EQ(replayed.layer.take_pick_counts().picks, eager.layer.take_pick_counts().picks);
    EXPECT_FALSE(replayed.layer.plan_status().overflow);
  }
}

TEST_P(CudaGraphTest, AReplayDisturbsNothingThatEagerStepsKeep) {
  Fixture f(GetParam(), kTokens * kTopK);
  const auto all = routings();
  f.set(all[0], 1);
  f.train();
  const CapturedGraph graph(f.device, [&] { f.train(); });
  f.set(all[1], 2);
  f.train();
  const auto expected = f.results();
  SavedForBackward saved;
  f.layer.forward(f.weights.weights(), {.x = f.x, .expert_ids = f.ids}, f.y, &saved);
  graph.replay();
  f.layer.backward(f.weights.weights(), saved, {.d_y = f.d_y, .d_losses = {0.1F, 0.01F}},
                   {.d_x = f.d_x, .gradients = f.gradients.views(), .d_weights = f.d_weights});
  const auto actual = f.results();
  for (std::size_t t = 0; t < actual.size(); ++t) {
    EXPECT_TRUE(same_bits(actual[t], expected[t])) << "tensor " << t;
  }
}

TEST_P(CudaGraphTest, AReplayThatOverflowsSaysSoAndTheNextIsSoundAgain) {
  constexpr std::int64_t kCapacity = 96;  // of up to 140 rows
  Fixture f(GetParam(), kCapacity);
  const auto all = routings();
  const Tensor& few = all[9];
  const Tensor& many = all[7];
  f.set(few, 1);
  f.train();
  const CapturedGraph graph(f.device, [&] { f.train(); });
  graph.replay();
  EXPECT_NO_THROW(f.layer.check());
  const auto sound = f.results();

  f.set(many, 2);
  graph.replay();
  const PlanStatus status = f.layer.plan_status();
  EXPECT_TRUE(status.overflow);
  EXPECT_EQ(status.needed_rows, std::vector<std::int64_t>{kTokens * kTopK});
  EXPECT_EQ(status.available_rows, kCapacity);
  expect_error<InvalidArgument>([&] { f.layer.check(); },
                                "overflow: rank 0 needs 140 rows, but the capacity is 96");

  f.set(few, 1);
  graph.replay();
  EXPECT_NO_THROW(f.layer.check());
  const auto again = f.results();
  for (std::size_t t = 0; t < sound.size(); ++t) {
    EXPECT_TRUE(same_bits(again[t], sound[t])) << "tensor " << t;
  }
}

TEST_P(CudaGraphTest, RunStepRunsAnOverflowingReplayAgainExactly) {
  Fixture f(GetParam(), 96);
  Fixture exact(GetParam(), kTokens * kTopK);
  const auto all = routings();
  f.set(all[9], 1);
  f.train();
  const CapturedGraph graph(f.device, [&] { f.train(); });
  f.layer.take_pick_counts();
  f.set(all[7], 2);
  exact.set(all[7], 2);
  exact.train();
  MoeLayer* const layers[] = {&f.layer};
  const bool again = run_step(layers, [&] {
    if (f.layer.options().sizing.is_bounded()) {
      graph.replay();
    } else {
      f.train();
    }
  });
  EXPECT_TRUE(again);
  EXPECT_GE(f.layer.options().sizing.capacity(), kTokens * kTopK);
  const auto actual = f.results();
  const auto expected = exact.results();
  for (std::size_t t = 0; t < actual.size(); ++t) {
    EXPECT_TRUE(same_bits(actual[t], expected[t])) << "tensor " << t;
  }
  EXPECT_EQ(f.layer.take_pick_counts().picks, exact.layer.take_pick_counts().picks);
}

TEST_P(CudaGraphTest, AStepThatWasNeverRunHasNoMemoryToBeCaptured) {
  Fixture f(GetParam(), kTokens * kTopK);
  f.set(routings()[0], 1);
  expect_error<DeviceError>([&] { const CapturedGraph graph(f.device, [&] { f.train(); }); },
                            "run the step once before it is captured");
  f.train();  // nothing is broken
  EXPECT_EQ(f.layer.take_pick_counts().num_tokens, kTokens);
  const CapturedGraph graph(f.device, [&] { f.train(); });
  graph.replay();
  f.device.synchronize();
}

TEST_P(CudaGraphTest, AGraphThatIsGoneGivesItsMemoryBack) {
  Fixture f(GetParam(), kTokens * kTopK);
  f.set(routings()[0], 1);
  f.train();
  const auto held = f.device.bytes_held();
  for (int i = 0; i < 3; ++i) {  // without a step in between: each finds what the last one had
    const CapturedGraph graph(f.device, [&] { f.train(); });
    graph.replay();
  }
  EXPECT_ANY_THROW(CapturedGraph(f.device, [&] {
    f.train();
    throw std::runtime_error("in the middle");
  }));
  f.train();
  EXPECT_EQ(f.device.bytes_held(), held);
  const auto expected = f.results();
  const CapturedGraph graph(f.device, [&] { f.train(); });
  graph.replay();
  const auto actual = f.results();
  for (std::size_t t = 0; t < actual.size(); ++t) {
    EXPECT_TRUE(same_bits(actual[t], expected[t])) << "tensor " << t;
  }
}

// What run_step itself needs is not taken from what the step left.
TEST_P(CudaGraphTest, AStepIsCapturedWithinRunStep) {
  Fixture f(GetParam(), kTokens * kTopK);
  f.set(routings()[0], 1);
  f.train();
  const auto expected = f.results();
  const auto picks = f.layer.take_pick_counts().picks;
  std::unique_ptr<CapturedGraph> graph;
  MoeLayer* const layers[] = {&f.layer};
  const bool again = run_step(layers, [&] {
    graph = std::make_unique<CapturedGraph>(f.device, [&] { f.train(); });
    graph->replay();
  });
  EXPECT_FALSE(again);
  EXPECT_EQ(f.layer.take_pick_counts().picks, picks);
  const auto actual = f.results();
  for (std::size_t t = 0; t < actual.size(); ++t) {
    EXPECT_TRUE(same_bits(actual[t], expected[t])) << "tensor " << t;
  }
}

TEST_P(CudaGraphTest, ExactSizingCannotBeCaptured) {
  Fixture f(GetParam(), kTokens * kTopK);
  auto options = f.layer.options();
  options.sizing = Sizing::exact();
  MoeLayer exact(*f.comm, f.placement, options, f.device);
  f.set(routings()[0], 1);
  const auto step = [&] {
    exact.forward(f.weights.weights(), {.x = f.x, .expert_ids = f.ids}, f.y, nullptr);
  };
  step();
  expect_error<DeviceError>([&] { const CapturedGraph graph(f.device, step); },
                            "give the layer bounded sizing");
}

INSTANTIATE_TEST_SUITE_P(CudaGraph, CudaGraphTest, ::testing::Values(Dtype::f32, Dtype::bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace
}  // namespace switchyard::testing::cuda_graph_test
