// SPDX-License-Identifier: Apache-2.0
// Tensors of more than 2³¹ elements, where memory allows.
#include <gtest/gtest.h>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/devices.h"
#include "support/random.h"
#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::cuda_large_test {
namespace {

// The last tokens of a long batch get what they get alone, though their rows lie beyond 2³¹
// elements, and 2³² bytes.
TEST(CudaLargeTest, RowsBeyondInt32) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  constexpr std::int64_t kTokens = 280000;
  constexpr std::int64_t kHidden = 4096;
  constexpr std::int64_t kLast = 64;
  const Device device = Device::cuda(cuda_options());
  const auto comm = connect();
  const auto placement = ExpertPlacement::contiguous(2, 1);
  const MoeLayerOptions options{.hidden = kHidden,
                                .intermediate = 64,
                                .router = RouterOptions::mixtral(2, 2),
                                .dtype = Dtype::bf16};
  try {
    MoeLayer layer(*comm, placement, options, device);
    const auto weights = MoeParameters::random(options, placement, 0, 1, Biases::none, device);
    const Tensor few = device.copy_of(Random(2).tensor({kLast, kHidden}, Dtype::bf16));
    const auto step = [&](const ConstTensorView& x, const ConstTensorView& d_y) {
      MoeParameters gradients(options, placement, 0, Biases::none, device);
      SavedForBackward saved;
      const Tensor y = layer.forward(weights.weights(), {.x = x}, saved);
      Tensor d_x = device.empty(x.shape(), Dtype::bf16);
      layer.backward(weights.weights(), saved, d_y, {.d_x = d_x, .gradients = gradients.views()});
      const auto rows = x.rows();
      return std::pair{device.to_host(y.view().slice(rows - kLast, rows)),
                       device.to_host(d_x.view().slice(rows - kLast, rows))};
    };
    const auto alone = step(few, few);
    Tensor x = device.empty({kTokens, kHidden}, Dtype::bf16);
    for (std::int64_t t = 0; t < kTokens; t += kLast) {
      device.copy(few.view().slice(0, std::min(kLast, kTokens - t)),
                  x.view().slice(t, std::min(t + kLast, kTokens)));
    }
    device.copy(few, x.view().slice(kTokens - kLast, kTokens));
    const auto among_many = step(x, x);
    EXPECT_TRUE(same_bits(among_many.first, alone.first));
    EXPECT_TRUE(same_bits(among_many.second, alone.second));
  } catch (const DeviceError& error) {
    if (std::string(error.what()).find("has no room") == std::string::npos) throw;
    GTEST_SKIP() << error.what();
  }
}

TEST(CudaLargeTest, RowsOfMoreThanAPitchBecomeZero) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  const Device device = Device::cuda(cuda_options());
  try {
    Tensor all = device.empty({2, (std::int64_t{1} << 15) + 1, 1 << 14}, Dtype::f32);
    const TensorView last(all.view().row(2) - 64, Dtype::f32, {16}, 1, all.view().owner(),
                          Memory::gpu);
    device.copy(Random(3).tensor({16}, Dtype::f32), last);
    backend_of(device).set_zero(all);
    EXPECT_TRUE(same_bits(device.to_host(last), Tensor::zeros({16}, Dtype::f32)));
  } catch (const DeviceError& error) {
    if (std::string(error.what()).find("has no room") == std::string::npos) throw;
    GTEST_SKIP() << error.what();
  }
}

}  // namespace
}  // namespace switchyard::testing::cuda_large_test
