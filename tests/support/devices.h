// Suites that run on every device: as Cpu/… and, where there is a GPU, as Cuda/….
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>

#include "switchyard/device.h"
#include "switchyard/error.h"

namespace switchyard::testing {

// Why there is no GPU to test on; empty if there is one.
inline std::string reason_for_no_gpu() {
  try {
    Device::cuda();
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
    device = Device::cuda();
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
