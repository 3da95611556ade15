// SPDX-License-Identifier: Apache-2.0
// Wrong uses of a GPU's tensors are refused, and devices do not disturb each other.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/checkpoint/moe_blocks.h"
#include "support/device/devices.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/captured_graph.h"
#include "switchyard/communicator.h"
#include "switchyard/error.h"
#include "switchyard/matmul.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::cuda_errors_test {
namespace {

class CudaErrors : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }

  static bool has(const std::string& message, std::string_view words) {
    return message.find(words) != std::string::npos;
  }
};

TEST_F(CudaErrors, ADeviceLeavesTheThreadOnItsOwnGpu) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (count < 2) GTEST_SKIP() << "there is one GPU here, and this takes two";
  const auto gpu_of_thread = [] {
    int ordinal = -1;
    cudaGetDevice(&ordinal);
    return ordinal;
  };
  cudaSetDevice(0);
  auto options = cuda_options();
  options.ordinal = 1;
  options.time_stages = true;
  const Device second = Device::cuda(options);
  EXPECT_EQ(gpu_of_thread(), 0);
  Tensor x = second.copy_of(Random(1).tensor({8, 8}, Dtype::f32));
  EXPECT_EQ(gpu_of_thread(), 0);
  const CapturedGraph graph(second, [&] { second.set_zero(x); });
  graph.replay();
  second.synchronize();
  const auto comm = connect();
  const auto placement = ExpertPlacement::contiguous(2, 1);
  MoeLayer layer(*comm, placement,
                 {.hidden = 8, .intermediate = 8, .router = RouterOptions::mixtral(2, 1)}, second);
  const auto weights =
      MoeParameters::random(layer.options(), placement, 0, 1, Biases::none, second);
  (void)layer.forward(weights.weights(), {.x = x});
  EXPECT_FALSE(layer.stats().forward.empty());
  EXPECT_EQ(gpu_of_thread(), 0);
}

TEST_F(CudaErrors, AGpuDoesNotReadTheHostsMemory) {
  const Device device = Device::cuda(cuda_options());
  const Tensor a({2, 2}, Dtype::f32);
  Tensor c = device.empty({2, 2}, Dtype::f32);
  EXPECT_EQ(error_of<InvalidArgument>([&] { matmul(device, Matmul{.a = a, .b = a, .c = c}); }),
            "a [2,2] is in host memory, but the device works in gpu memory; copy it with "
            "Device::copy_of");
  device.synchronize();
}

TEST_F(CudaErrors, ParametersAreNotCopiedBetweenDevicesOfAGpu) {
  const Device first = Device::cuda(cuda_options());
  const Device second = Device::cuda(cuda_options());
  const auto parameters = block_of(4).parameters.copy_on(first);
  const auto message = error_of<Unsupported>([&] { (void)parameters.copy_on(second); });
  EXPECT_TRUE(has(message, "copy them to the CPU first")) << message;
  (void)parameters.copy_on(first).copy_on(Device()).copy_on(second);
}

TEST_F(CudaErrors, WorkAfterAForwardIsNotTimedAsAStage) {
  CudaOptions timed = cuda_options();
  timed.time_stages = true;
  const Device device = Device::cuda(timed);
  const auto comm = connect();
  const auto placement = ExpertPlacement::contiguous(4, 1);
  const auto options = options_with(4);
  MoeLayer layer(*comm, placement, options, device);
  const auto parameters = MoeParameters::random(options, placement, 0, 1, Biases::none, device);
  const Tensor x = device.copy_of(Random(1).tensor({9, options.hidden}, Dtype::f32));
  (void)layer.forward(parameters.weights(), {.x = x});
  const auto seconds = [&] {
    double sum = 0.0;
    for (const auto& stage : layer.stats().forward) sum += stage.seconds;
    return sum;
  };
  const double before = seconds();
  EXPECT_GT(before, 0.0);

  const Experts experts(options.experts(), device);
  Dispatcher dispatcher(*comm, placement, {.plan = {.hidden = options.hidden}}, device);
  const Plan plan = dispatcher.plan(device.copy_of(Tensor::zeros({9, 1}, Dtype::i32)));
  Tensor rows = dispatcher.dispatch(plan, x);
  experts.forward(parameters.weights().experts, RowGroups::of(plan), {.rows = rows}, {.out = rows});
  EXPECT_EQ(seconds(), before);
}

}  // namespace
}  // namespace switchyard::testing::cuda_errors_test
