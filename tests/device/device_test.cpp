// What a device offers besides kernels.
#include "switchyard/device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

using testing::error_of;

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

}  // namespace
}  // namespace switchyard
