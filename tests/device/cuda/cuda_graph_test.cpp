// SPDX-License-Identifier: Apache-2.0
// A whole layer in one CUDA graph: captured once, replayed with other routings.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "device/cuda/layer_fixture.h"
#include "support/errors.h"
#include "switchyard/captured_graph.h"

namespace switchyard::testing::cuda_graph_test {
namespace {

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
  LayerFixture replayed(GetParam(), kTokens * kTopK);
  LayerFixture eager(GetParam(), kTokens * kTopK);
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
  LayerFixture replayed(GetParam(), kTokens * kTopK);
  LayerFixture eager(GetParam(), kTokens * kTopK);
  expect_replays_equal_eager(replayed, eager,
                             [&] { EXPECT_FALSE(replayed.layer.plan_status().overflow); });
}

TEST_P(CudaGraphTest, AReplayDisturbsNothingThatEagerStepsKeep) {
  LayerFixture f(GetParam(), kTokens * kTopK);
  const auto all = routings();
  f.set(all[0], 1);
  f.train();
  const CapturedGraph graph(f.device, [&] { f.train(); });
  f.set(all[1], 2);
  f.train();
  const auto expected = f.results();
  f.train_around(graph);
  const auto actual = f.results();
  expect_same_tensors(actual, expected);
}

// The graph goes on using what the step before it took and the captured one gave back.
TEST_P(CudaGraphTest, ABackwardCapturedAloneDisturbsNothingThatEagerStepsKeep) {
  LayerFixture f(GetParam(), kTokens * kTopK);
  const auto all = routings();
  f.set(all[1], 2);
  f.train();
  const auto expected = f.results();
  SavedForBackward first;
  f.forward(first);
  const CapturedGraph graph(f.device, [&] {
    SavedForBackward used = std::move(first);
    f.backward(used);
  });
  f.train_around(graph);
  expect_same_tensors(f.results(), expected);
}

// A graph that uses memory of another one outlives that.
TEST_P(CudaGraphTest, MemoryOfTwoGraphsIsFreeWhenBothAreGone) {
  LayerFixture f(GetParam(), kTokens * kTopK);
  f.set(routings()[1], 2);
  f.train();
  const auto expected = f.results();
  SavedForBackward handed_on;
  auto forward = std::make_unique<CapturedGraph>(f.device, [&] { f.forward(handed_on); });
  f.train();  // so that the second graph finds memory of its own
  const CapturedGraph backward(f.device, [&] {
    SavedForBackward used = std::move(handed_on);
    f.backward(used);
  });
  forward->replay();
  forward.reset();
  f.train_around(backward);
  expect_same_tensors(f.results(), expected);
}

TEST_P(CudaGraphTest, AnotherThreadMayUseTheLegacyStreamMeanwhile) {
  LayerFixture f(GetParam(), kTokens * kTopK);
  Tensor elsewhere = f.device.empty({64}, Dtype::i32);
  f.set(routings()[0], 1);
  f.train();
  const auto expected = f.results();
  cudaError_t status = cudaSuccess;
  const CapturedGraph graph(f.device, [&] {
    f.train();
    std::thread([&] {
      status = cudaMemsetAsync(elsewhere.data(), 0, 256, cudaStreamLegacy);
    }).join();
  });
  EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
  graph.replay();
  expect_same_tensors(f.results(), expected);
}

TEST_P(CudaGraphTest, AReplayThatOverflowsSaysSoAndTheNextIsSoundAgain) {
  constexpr std::int64_t kCapacity = 96;  // of up to 140 rows
  LayerFixture f(GetParam(), kCapacity);
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
  expect_same_tensors(again, sound);
}

TEST_P(CudaGraphTest, RunStepRunsAnOverflowingReplayAgainExactly) {
  LayerFixture f(GetParam(), 96);
  LayerFixture exact(GetParam(), kTokens * kTopK);
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
  expect_same_tensors(actual, expected);
  EXPECT_EQ(f.layer.take_pick_counts().picks, exact.layer.take_pick_counts().picks);
}

TEST_P(CudaGraphTest, AStepThatWasNeverRunHasNoMemoryToBeCaptured) {
  LayerFixture f(GetParam(), kTokens * kTopK);
  f.set(routings()[0], 1);
  expect_error<DeviceError>([&] { const CapturedGraph graph(f.device, [&] { f.train(); }); },
                            "run the step once before capturing it");
  f.train();  // nothing is broken
  EXPECT_EQ(f.layer.take_pick_counts().num_tokens, kTokens);
  const CapturedGraph graph(f.device, [&] { f.train(); });
  graph.replay();
  f.device.synchronize();
}

TEST_P(CudaGraphTest, AGraphThatIsGoneGivesItsMemoryBack) {
  LayerFixture f(GetParam(), kTokens * kTopK);
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
  expect_same_tensors(actual, expected);
}

// run_step's own memory is not taken from memory that the step freed.
TEST_P(CudaGraphTest, AStepIsCapturedWithinRunStep) {
  LayerFixture f(GetParam(), kTokens * kTopK);
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
  expect_same_tensors(actual, expected);
}

TEST_P(CudaGraphTest, ExactSizingCannotBeCaptured) {
  LayerFixture f(GetParam(), kTokens * kTopK);
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
