// SPDX-License-Identifier: Apache-2.0
// Many replays at several ranks on one GPU, while something else goes on there.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda/gate.h"
#include "device/cuda/layer_fixture.h"

namespace switchyard::testing::cuda_ranks_soak_test {
namespace {

constexpr int kRanks = 4;

// Copies in a loop, on a stream of its own.
class Disturber {
 public:
  Disturber() {
    for (void*& buffer : buffers_) require_success(cudaMalloc(&buffer, kBytes));
    require_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    thread_ = std::jthread([this](const std::stop_token& stop) {
      for (int i = 0; !stop.stop_requested(); ++i) {
        cudaMemcpyAsync(buffers_[i % 2], buffers_[1 - i % 2], kBytes, cudaMemcpyDeviceToDevice,
                        stream_);
        cudaMemsetAsync(buffers_[i % 2], i, kBytes / 2, stream_);
        cudaStreamSynchronize(stream_);
      }
    });
  }
  ~Disturber() {
    thread_.request_stop();
    thread_.join();
    cudaStreamDestroy(stream_);
    for (void* const buffer : buffers_) cudaFree(buffer);
  }
  Disturber(const Disturber&) = delete;
  Disturber& operator=(const Disturber&) = delete;

 private:
  static constexpr std::size_t kBytes = std::size_t{8} << 20;

  std::array<void*, 2> buffers_{};
  cudaStream_t stream_ = nullptr;
  std::jthread thread_;
};

// FNV-1a.
std::uint64_t hash_of(std::span<const Tensor> tensors) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const Tensor& tensor : tensors) {
    for (const std::byte byte :
         std::span(tensor.data(), static_cast<std::size_t>(tensor.bytes()))) {
      hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3U;
    }
  }
  return hash;
}

int soak_steps() {
  const char* const given = std::getenv("SWITCHYARD_TEST_SOAK_STEPS");
  return given == nullptr ? 200 : std::atoi(given);
}

class CudaRanksSoak : public ::testing::TestWithParam<Dtype> {};

// SWITCHYARD_TEST_SOAK_STEPS of them.
TEST_P(CudaRanksSoak, EveryReplayOfAnInputHasTheSameBits) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  constexpr std::size_t kInputs = 10;
  const Disturber disturber;
  on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
    struct Input {
      Tensor x, d_y, ids;
      std::uint64_t hash = 0;
    };
    LayerFixture f(graph_options(GetParam(), rows_of(kRanks)), device, comm);
    const auto hash = [&] {
      const std::array results{device.to_host(f.y), device.to_host(f.d_x)};
      return hash_of(results);
    };
    const auto all = f.own_routings();
    std::vector<Input> inputs;
    for (std::size_t i = 0; i < kInputs; ++i) {
      f.set(all[i], i);
      f.train();
      inputs.push_back({device.copy_of(f.x), device.copy_of(f.d_y), device.copy_of(f.ids), hash()});
    }
    f.train();  // once more: the inputs have taken memory that steps left
    f.all_done();
    const CapturedGraph graph(device, [&] { f.train(); });
    f.all_done();
    Random random(3);  // alike on all ranks
    int num_wrong = 0;
    const int steps = soak_steps();
    for (int step = 0; step < steps; ++step) {
      const auto& input = inputs[static_cast<std::size_t>(random.below(kInputs))];
      device.copy(input.x, f.x);
      device.copy(input.d_y, f.d_y);
      device.copy(input.ids, f.ids);
      graph.replay();
      if (hash() == input.hash) continue;
      if (++num_wrong == 1) ADD_FAILURE() << "step " << step << " on rank " << comm.rank();
    }
    EXPECT_EQ(num_wrong, 0) << "of " << steps << " on rank " << comm.rank();
    f.all_done();
  });
}

INSTANTIATE_TEST_SUITE_P(CudaRanks, CudaRanksSoak, ::testing::Values(Dtype::f32, Dtype::bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace
}  // namespace switchyard::testing::cuda_ranks_soak_test
