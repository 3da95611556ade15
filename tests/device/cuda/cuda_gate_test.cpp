// SPDX-License-Identifier: Apache-2.0
// A bounded step waits for nothing: it returns while its stream is held up.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "device/cuda/gate.h"
#include "support/compare.h"
#include "support/device/devices.h"
#include "support/random.h"
#include "switchyard/captured_graph.h"
#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::cuda_gate_test {
namespace {

class CudaGate : public ::testing::TestWithParam<Biases> {};

TEST_P(CudaGate, AStepAndAReplayReturnBeforeTheirStreamRuns) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  constexpr std::int64_t kTokens = 200;
  const Device device = Device::cuda(cuda_options());
  const auto comm = connect();
  const auto placement = ExpertPlacement::contiguous(8, 1);
  const MoeLayerOptions options{.hidden = 64,
                                .intermediate = 128,
                                .router = RouterOptions::deepseek_v3(8, 2),
                                .dtype = Dtype::bf16,
                                .shared_intermediate = 64,
                                .losses = {.balance = BalanceLoss::batch, .z = true},
                                .capacity = {.factor = 1.5},
                                .gradient_scale = GradientScale::global,
                                .sizing = Sizing::bounded(2 * kTokens + 8 * 16),
                                .alignment = 16};
  MoeLayer layer(*comm, placement, options, device);
  const auto weights = MoeParameters::random(options, placement, 0, 1, GetParam(), device);
  MoeParameters gradients(options, placement, 0, GetParam(), device);
  const Tensor x = device.copy_of(Random(1).tensor({kTokens, 64}, Dtype::bf16));
  Tensor y = device.empty(x.shape(), Dtype::bf16);
  Tensor d_x = device.empty(x.shape(), Dtype::bf16);
  const auto step = [&] {
    SavedForBackward saved;
    layer.forward(weights.weights(), {.x = x}, y, &saved);
    layer.backward(weights.weights(), saved, {.d_y = x, .d_losses = {0.1F, 0.1F}},
                   {.d_x = d_x, .gradients = gradients.views()});
  };
  step();
  const CapturedGraph graph(device, step);
  graph.replay();
  const Tensor expected = device.to_host(d_x);
  step();
  device.set_zero(d_x);
  device.synchronize();
  for (const bool replays : {false, true}) {
    Gate closed;
    closed.close(device.stream());
    auto returned = std::async(std::launch::async, [&] { replays ? graph.replay() : step(); });
    EXPECT_EQ(returned.wait_for(std::chrono::seconds(20)), std::future_status::ready)
        << (replays ? "a replay waits" : "a step waits");
    EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(device.stream().handle)), cudaErrorNotReady)
        << "the gate holds nothing up";
    closed.open();
    returned.get();
    EXPECT_TRUE(same_bits(device.to_host(d_x), expected));
    device.set_zero(d_x);
  }
}

INSTANTIATE_TEST_SUITE_P(CudaGate, CudaGate, ::testing::Values(Biases::none, Biases::all),
                         [](const auto& param) {
                           return param.param == Biases::all ? "with_biases" : "without_biases";
                         });

}  // namespace
}  // namespace switchyard::testing::cuda_gate_test
