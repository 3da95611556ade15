// SPDX-License-Identifier: Apache-2.0
// How many launches a forward of few tokens takes, since each costs more than its kernel's work.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/cuda/backend.h"
#include "device/cuda/gate.h"
#include "support/compare.h"
#include "support/device/devices.h"
#include "support/random.h"
#include "support/wide_ids.h"
#include "switchyard/captured_graph.h"
#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"
#include "switchyard/local_plan.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::cuda_few_tokens_test {
namespace {

constexpr int kExperts = 128;
constexpr std::int64_t kTopK = 8;

class CudaFewTokens : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
    device = Device::cuda(cuda_options());
  }

  // Returns how many kernels, copies and fills a step consists of.
  std::size_t launches_of(const std::function<void()>& step) const {
    step();  // takes the memory
    cuda::Context& context = cuda::context_of(device);
    const cuda::OnGpu gpu(context.ordinal());
    const auto capture = context.begin_capture();
    step();
    int status = cudaSuccess;
    cudaGraph_t const graph = context.end_capture(status);
    require_success(static_cast<cudaError_t>(status));
    std::size_t count = 0;
    require_success(cudaGraphGetNodes(graph, nullptr, &count));
    cudaGraphDestroy(graph);
    context.release_capture(capture);
    return count;
  }
  static Tensor ids_of(std::int64_t num_tokens) {
    return Random(1).expert_ids(
        {.num_tokens = num_tokens, .top_k = kTopK, .num_experts = kExperts, .skew = 0.3});
  }

  Device device;
};

TEST_F(CudaFewTokens, APlanIsOneKernelUpToItsLimit) {
  for (const std::int64_t num_tokens : {1, 64, 256, 257}) {
    const LocalPlanOptions options{.num_tokens = num_tokens,
                                   .top_k = kTopK,
                                   .num_experts = kExperts,
                                   .sentinel_ids = SentinelIds::allow};
    Tensor memory = device.empty({options.num_words()}, Dtype::i32);
    const LocalPlan plan(device, options, memory);
    const Tensor ids = device.copy_of(wide_ids(ids_of(num_tokens), kExperts));
    const auto launches = launches_of([&] { plan.make(ids); });
    if (num_tokens <= 256) {
      EXPECT_EQ(launches, 1U) << num_tokens << " tokens";
    } else {
      EXPECT_GT(launches, 1U) << num_tokens << " tokens";
    }
  }
}

// A layer's forward with given picks: the plan, two products and the combine.
struct Forward {
  Forward(const Device& on, std::int64_t num_tokens)
      : device(on),
        comm(connect()),
        placement(ExpertPlacement::contiguous(kExperts, 1)),
        options{.hidden = 128,
                .intermediate = 64,
                .router = RouterOptions::deepseek_v3(kExperts, kTopK),
                .dtype = Dtype::bf16},
        parameters(MoeParameters::random(options, placement, 0, 1, Biases::none, device)),
        dispatcher(*comm, placement,
                   {.plan = {.hidden = options.hidden,
                             .dtype = Dtype::bf16,
                             .sizing = Sizing::bounded(num_tokens * kTopK)}},
                   device),
        experts(
            {.hidden = options.hidden, .intermediate = options.intermediate, .dtype = Dtype::bf16},
            device),
        x(device.copy_of(Random(2).tensor({num_tokens, options.hidden}, Dtype::bf16))),
        weights(device.copy_of(Random(3).tensor({num_tokens, kTopK}, Dtype::f32))),
        y(device.empty(x.shape(), Dtype::bf16)) {}

  void run(const Tensor& ids) {
    const Plan plan = dispatcher.plan(ids);
    Tensor rows = device.empty({plan.row_capacity(), options.hidden}, Dtype::bf16);
    const TokenRows tokens{.x = x, .row_sources = plan.row_sources(), .top_k = kTopK};
    experts.forward(parameters.weights().experts, RowGroups::of(plan), {.tokens = tokens},
                    {.out = rows});
    dispatcher.combine(plan, {.rows = rows, .weights = weights}, y);
  }

  Device device;
  std::unique_ptr<Communicator> comm;
  ExpertPlacement placement;
  MoeLayerOptions options;
  MoeParameters parameters;
  Dispatcher dispatcher;
  Experts experts;
  Tensor x;
  Tensor weights;
  Tensor y;
};

TEST_F(CudaFewTokens, AForwardIsFourKernels) {
  for (const std::int64_t num_tokens : {1, 64, 256}) {
    Forward forward(device, num_tokens);
    if (!forward.experts.reads_tokens()) {
      GTEST_SKIP() << "these kernels do not read tokens";
    }
    const Tensor ids = device.copy_of(ids_of(num_tokens));
    EXPECT_EQ(launches_of([&] { forward.run(ids); }), 4U) << num_tokens << " tokens";
  }
}

// Every kernel starts before the one in front of it has ended, and replays follow each other
// without a pause. A kernel that did not wait would read what another replay has left.
TEST_F(CudaFewTokens, KernelsThatStartEarlyWaitForTheirInput) {
  constexpr std::int64_t kTokens = 16;
  Forward forward(device, kTokens);
  if (!forward.experts.reads_tokens()) {
    GTEST_SKIP() << "these kernels do not read tokens";
  }
  const Tensor first = device.copy_of(ids_of(kTokens));
  const Tensor second = device.copy_of(
      Random(9).expert_ids({.num_tokens = kTokens, .top_k = kTopK, .num_experts = kExperts}));
  forward.run(first);
  const Tensor y_of_first = device.to_host(forward.y);
  forward.run(second);
  const Tensor y_of_second = device.to_host(forward.y);
  EXPECT_FALSE(same_bits(y_of_first, y_of_second));
  Tensor ids = device.copy_of(first);
  forward.run(ids);  // takes the memory that the captured step will use
  const CapturedGraph graph(device, [&] { forward.run(ids); });
  std::vector<Tensor> results;
  for (int i = 0; i < 200; ++i) {
    device.copy(i % 2 == 0 ? first : second, ids);
    graph.replay();
    results.push_back(device.copy_of(forward.y));
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_TRUE(same_bits(device.to_host(results[i]), i % 2 == 0 ? y_of_first : y_of_second));
  }
}

}  // namespace
}  // namespace switchyard::testing::cuda_few_tokens_test
