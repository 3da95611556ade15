// SPDX-License-Identifier: Apache-2.0
// A GPU whose memory is the program's: nothing is kept, captures need no step before them, and
// streams do not wait for each other.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "device/cuda/gate.h"
#include "device/cuda/layer_fixture.h"
#include "device/device_backend.h"
#include "support/errors.h"

namespace switchyard::testing::cuda_allocator_test {
namespace {

// Hands out pieces of one block, and never the same one twice.
class Arena {
 public:
  explicit Arena(std::int64_t bytes) : size_(bytes) {
    require_success(cudaMalloc(&memory_, static_cast<std::size_t>(bytes)));
  }
  ~Arena() { cudaFree(memory_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  DeviceAllocator allocator() {
    return {.allocate =
                [this](std::int64_t bytes, Stream stream) {
                  const std::scoped_lock lock(mutex_);
                  if (used_ + bytes > size_) return static_cast<void*>(nullptr);
                  void* const data = static_cast<std::byte*>(memory_) + used_;
                  used_ += (bytes + 255) / 256 * 256;
                  streams_.emplace(data, stream);
                  return data;
                },
            .free =
                [this](void* data, Stream stream) {
                  const std::scoped_lock lock(mutex_);
                  const auto found = streams_.find(data);
                  ASSERT_NE(found, streams_.end());
                  EXPECT_EQ(found->second, stream);
                  streams_.erase(found);
                }};
  }
  std::size_t num_taken() const { return streams_.size(); }
  std::int64_t used() const { return used_; }

 private:
  std::mutex mutex_;
  void* memory_ = nullptr;
  std::int64_t size_;
  std::int64_t used_ = 0;
  std::map<void*, Stream> streams_;
};

Device device_of(Arena& arena) {
  auto options = cuda_options();
  options.allocator = arena.allocator();
  return Device::cuda(options);
}

class CudaAllocatorTest : public ::testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static MoeLayerOptions options() { return graph_options(GetParam(), kTokens * kTopK); }
};

TEST_P(CudaAllocatorTest, EverythingIsGivenBackAndBitsStay) {
  LayerFixture expected(options());
  expected.set(routings()[0], 1);
  expected.train();
  Arena arena(std::int64_t{1} << 30);
  {
    const Device device = device_of(arena);
    {
      LayerFixture f(options(), device);
      f.set(routings()[0], 1);
      f.train();
      const std::int64_t after_one = arena.used();
      f.train();
      EXPECT_GT(arena.used(), after_one) << "blocks are kept";
      expect_same_tensors(f.results(), expected.results());
    }
    device.synchronize();
    EXPECT_EQ(arena.num_taken(), 0U) << "something is kept";
    EXPECT_EQ(device.bytes_held(), 0);
  }
}

TEST_P(CudaAllocatorTest, AStepIsCapturedThatNeverRan) {
  Arena arena(std::int64_t{1} << 30);
  LayerFixture replayed(options(), device_of(arena));
  LayerFixture eager(options());
  const auto all = routings();
  const CapturedGraph graph(replayed.device, [&] { replayed.train(); });
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    replayed.set(all[i], 10 + i);
    eager.set(all[i], 10 + i);
    graph.replay();
    eager.train();
    expect_same_tensors(replayed.results(), eager.results());
  }
}

// A table that one stream uploads late is found by another, which must not read it before.
TEST_P(CudaAllocatorTest, TablesAreUploadedBeforeOtherStreamsReadThem) {
  Arena arena(std::int64_t{1} << 26);
  const Device device = device_of(arena);
  std::array<cudaStream_t, 2> streams{};
  for (auto& stream : streams) {
    require_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  const std::vector<std::int32_t> values{7, 8, 9};
  Gate gate;
  device.set_stream({streams[0]});
  gate.close(device.stream());
  backend_of(device).constant(values);
  device.set_stream({streams[1]});
  Tensor copied = device.empty({3}, Dtype::i32);
  device.copy(backend_of(device).constant(values), copied);
  EXPECT_EQ(cudaStreamQuery(streams[1]), cudaErrorNotReady) << "it does not wait";
  gate.open();
  const Tensor host = device.to_host(copied);
  EXPECT_EQ(host.span<std::int32_t>()[0], 7);
  EXPECT_EQ(host.span<std::int32_t>()[2], 9);
  for (const auto stream : streams) cudaStreamDestroy(stream);
}

TEST_P(CudaAllocatorTest, AnAllocatorWithoutRoomIsNamed) {
  Arena arena(1024);
  const Device device = device_of(arena);
  const auto message = error_of<DeviceError>([&] { device.empty({1 << 20}, Dtype::f32); });
  EXPECT_NE(message.find("the program's allocator has no room for 4194304 bytes"),
            std::string::npos)
      << message;
}

INSTANTIATE_TEST_SUITE_P(CudaAllocator, CudaAllocatorTest,
                         ::testing::Values(Dtype::f32, Dtype::bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace
}  // namespace switchyard::testing::cuda_allocator_test
