// SPDX-License-Identifier: Apache-2.0
// Suites that run on every device: as Cpu/…, and as Cuda/… if there is a GPU.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "switchyard/device.h"
#include "switchyard/error.h"

namespace switchyard::testing {

// Options for the GPU devices of tests. SWITCHYARD_TEST_CUDA_KERNELS=portable in the environment
// disables the architecture-specific kernels, so that a suite can run both ways.
inline CudaOptions cuda_options() {
  const char* const given = std::getenv("SWITCHYARD_TEST_CUDA_KERNELS");
  const std::string_view kernels = given == nullptr ? "best" : given;
  if (kernels == "best") return {.kernels = CudaKernels::best};
  if (kernels == "portable") return {.kernels = CudaKernels::portable};
  throw InvalidArgument("SWITCHYARD_TEST_CUDA_KERNELS is neither best nor portable");
}

// Returns why there is no GPU to test on; empty if there is one.
inline std::string reason_for_no_gpu() {
  try {
    Device::cuda(cuda_options());
    return {};
  } catch (const Unsupported& error) {
    return error.what();
  }
}

class OnDevices : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string_view(GetParam()) == "cpu") return;
    static const std::string reason = reason_for_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
    device = Device::cuda(cuda_options());
  }

  Tensor put(const ConstTensorView& host) const { return device.copy_of(host); }
  Tensor get(const ConstTensorView& view) const { return device.to_host(view); }

  Device device;
};

}  // namespace switchyard::testing

#define SWITCHYARD_ON_DEVICES(Suite)                                       \
  INSTANTIATE_TEST_SUITE_P(Cpu, Suite, ::testing::Values("cpu"),           \
                           [](const auto& param) { return param.param; }); \
  INSTANTIATE_TEST_SUITE_P(Cuda, Suite, ::testing::Values("cuda"),         \
                           [](const auto& param) { return param.param; })
