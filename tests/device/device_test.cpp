// SPDX-License-Identifier: Apache-2.0
// A device's functions besides kernels.
#include "switchyard/device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/error.h"

namespace switchyard::device_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::same_bits;

class DeviceTest : public ::testing::TestWithParam<int> {
 protected:
  const Device device_ = Device::cpu({.num_threads = GetParam()});
};

TEST_P(DeviceTest, ParallelForVisitsEveryIndexOnce) {
  for (const std::int64_t count : {1, 2, 63, 64, 65, 129, 1000}) {
    std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
    device_.parallel_for(count, [&](std::int64_t first, std::int64_t last) {
      for (auto i = first; i < last; ++i) ++visits.at(static_cast<std::size_t>(i));
    });
    for (const auto& visit : visits) ASSERT_EQ(visit, 1) << count;
  }
}

TEST_P(DeviceTest, ParallelForOfNothingCallsNothing) {
  device_.parallel_for(0, [](std::int64_t, std::int64_t) { FAIL() << "there is nothing to do"; });
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { device_.parallel_for(-1, [](std::int64_t, std::int64_t) {}); }),
            "count (-1) must not be negative");
}

TEST_P(DeviceTest, ParallelForThrowsWhatAPieceThrows) {
  const auto fail = [&] {
    device_.parallel_for(1000, [](std::int64_t /*first*/, std::int64_t last) {
      if (last == 1000) throw std::out_of_range("the last piece");
    });
  };
  EXPECT_EQ(error_of<std::out_of_range>(fail), "the last piece");
  EXPECT_EQ(error_of<std::out_of_range>(fail), "the last piece");  // and works afterwards
}

INSTANTIATE_TEST_SUITE_P(Threads, DeviceTest, ::testing::Values(1, 2, 4));

TEST(DeviceMemory, IsReused) {
  const Device device;
  EXPECT_EQ(device.memory(), Memory::host);
  EXPECT_EQ(device.empty({4, 8}, Dtype::bf16).shape(), (Shape{4, 8}));
  const auto held = device.bytes_held();
  EXPECT_GE(held, 4 * 8 * 2);
  EXPECT_EQ(device.empty({4, 8}, Dtype::bf16).memory(), Memory::host);
  EXPECT_EQ(device.bytes_held(), held);
}

TEST(DeviceMemory, CountsWhatOtherRanksReach) {
  const Device device;
  const auto before = device.bytes_held();
  auto heap = backend_of(device).make_peer_heap({});
  (void)heap->take({1000}, Dtype::f32);
  EXPECT_EQ(device.bytes_held(), before + heap->bytes_held());
  EXPECT_GE(device.bytes_held(), before + 4000);
  heap.reset();
  EXPECT_EQ(device.bytes_held(), before);
}

TEST(DeviceMemory, CopiesRowsThatLieApart) {
  const Device device;
  const Tensor wide = testing::Random(1).tensor({3, 8}, Dtype::f32);
  const ConstTensorView apart(wide.data(), Dtype::f32, {3, 5}, 8, wide.view().owner());
  const Tensor copy = device.copy_of(apart);
  EXPECT_TRUE(same_bits(copy, apart));
  EXPECT_NE(copy.data(), wide.data());
  EXPECT_TRUE(same_bits(device.to_host(apart), apart));
  Tensor other = Tensor::zeros({3, 8}, Dtype::f32);
  const TensorView target(other.data(), Dtype::f32, {3, 5}, 8, other.view().owner());
  device.copy(copy, target);
  EXPECT_TRUE(same_bits(target, apart));
  EXPECT_EQ(other.span<float>()[5], 0.0F);  // what lies between them stays
  EXPECT_EQ(device.copy_of(Tensor({0, 4}, Dtype::i32)).shape(), (Shape{0, 4}));
}

TEST(DeviceMemory, SetsItsOwnToZero) {
  const Device device;
  Tensor tensor = testing::Random(2).tensor({3}, Dtype::f32);
  EXPECT_EQ(error_of<InvalidArgument>([&] { device.set_zero(elsewhere(tensor)); }),
            "gpu memory cannot be set to zero by a device of host memory");
  device.set_zero(tensor);
  EXPECT_TRUE(same_bits(tensor, Tensor::zeros({3}, Dtype::f32)));
}

TEST(DeviceMemory, CopiesWhatFitsAndIsInReach) {
  const Device device;
  Tensor from({2}, Dtype::f32);
  Tensor to({3}, Dtype::f32);
  EXPECT_EQ(error_of<InvalidArgument>([&] { device.copy(from, to); }),
            "a copy of f32 [2] does not fit into f32 [3]");
  EXPECT_EQ(error_of<InvalidArgument>([&] { device.to_host(elsewhere(from)); }),
            "the CPU's device cannot copy from gpu to host memory; use the GPU's device");
}

TEST(DeviceMemory, ACpuHasNoStreams) {
  const Device device;
  EXPECT_EQ(device.stream(), Stream{});
  device.synchronize();
  EXPECT_EQ(device.host_syncs(), 0);
}

}  // namespace
}  // namespace switchyard::device_test
