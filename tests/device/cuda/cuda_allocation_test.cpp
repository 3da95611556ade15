// SPDX-License-Identifier: Apache-2.0
// Device and pinned memory runs out on one of two ranks, at one allocation after the other.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "device/cuda/layer_fixture.h"
#include "support/device/devices.h"
#include "switchyard/error.h"

namespace {

thread_local int allocations_left = -1;  // until every one fails; negative: none does
thread_local int num_failed = 0;

decltype(&cuMemCreate) real_create = nullptr;

bool fails() {
  if (allocations_left < 0) return false;
  if (allocations_left > 0) {
    --allocations_left;
    return false;
  }
  ++num_failed;
  return true;
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long flags) {
  return fails() ? CUDA_ERROR_OUT_OF_MEMORY : real_create(handle, bytes, properties, flags);
}

}  // namespace

// The linker sends the library's calls here (--wrap).
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier)
cudaError_t __real_cudaMalloc(void** data, std::size_t bytes);
cudaError_t __wrap_cudaMalloc(void** data, std::size_t bytes) {
  return fails() ? cudaErrorMemoryAllocation : __real_cudaMalloc(data, bytes);
}
cudaError_t __real_cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool,
                                           cudaStream_t stream);
cudaError_t __wrap_cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool,
                                           cudaStream_t stream) {
  return fails() ? cudaErrorMemoryAllocation
                 : __real_cudaMallocFromPoolAsync(data, bytes, pool, stream);
}
cudaError_t __real_cudaHostAlloc(void** data, std::size_t bytes, unsigned flags);
cudaError_t __wrap_cudaHostAlloc(void** data, std::size_t bytes, unsigned flags) {
  return fails() ? cudaErrorMemoryAllocation : __real_cudaHostAlloc(data, bytes, flags);
}
// Peer heaps allocate through the driver.
cudaError_t __real_cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                    unsigned version, unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult* result);
cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                    unsigned version, unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult* result) {
  const auto status =
      __real_cudaGetDriverEntryPointByVersion(name, function, version, flags, result);
  if (std::string_view(name) == "cuMemCreate" && *function != nullptr) {
    real_create = reinterpret_cast<decltype(real_create)>(*function);
    *function = reinterpret_cast<void*>(&create);
  }
  return status;
}
// NOLINTEND(bugprone-reserved-identifier)
}

namespace switchyard::testing::cuda_allocation_test {
namespace {

constexpr int kRanks = 2;
constexpr int kFailing = 1;

struct RankEnd {
  std::string error = {};
  bool is_communication_error = false;
  std::vector<int> named = {};
};

// Lets rank kFailing allocate `number` times. Returns whether it wanted more.
bool runs_out_after(int number, Dtype dtype, std::array<RankEnd, kRanks>& ends) {
  bool ran_out = false;
  on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
    RankEnd& end = ends[static_cast<std::size_t>(comm.rank())];
    num_failed = 0;
    if (comm.rank() == kFailing) allocations_left = number;
    try {
      LayerFixture f(graph_options(dtype, rows_of(kRanks)), device, comm);
      f.set(f.own_routings()[0], 1);
      f.train();
      f.layer.check();
      f.all_done();
    } catch (const CommunicationError& error) {
      end = {error.what(), true, error.ranks()};
    } catch (const std::exception& error) {
      end = {.error = error.what()};
      comm.abort(error.what());  // as run_ranks does for an error that nobody catches
    }
    allocations_left = -1;
    if (comm.rank() == kFailing) ran_out = num_failed > 0;
  });
  return ran_out;
}

class CudaAllocation : public ::testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
    if (under_mpirun()) GTEST_SKIP() << "allocations fail on ranks that are threads";
  }
};

TEST_P(CudaAllocation, FailureIsAnErrorOnEveryRank) {
  int number = 0;
  for (bool ran_out = true; ran_out; ++number) {
    SCOPED_TRACE("after " + std::to_string(number) + " allocations");
    std::array<RankEnd, kRanks> ends;
    ran_out = runs_out_after(number, GetParam(), ends);
    const RankEnd& failing = ends[kFailing];
    const RankEnd& other = ends[1 - kFailing];
    if (!ran_out) {
      EXPECT_EQ(failing.error + other.error, "");
      continue;
    }
    EXPECT_FALSE(failing.error.empty());
    EXPECT_FALSE(failing.is_communication_error) << failing.error;
    // Setting up peer memory ends in one error on all ranks; elsewhere the other rank is told.
    const auto named = "rank " + std::to_string(kFailing);
    EXPECT_NE(other.error.find(named), std::string::npos) << other.error;
    if (other.is_communication_error) {
      EXPECT_EQ(other.named, std::vector{kFailing}) << other.error;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(number, 5);
  std::printf("%d allocations\n", number - 1);
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaAllocation, ::testing::Values(Dtype::f32, Dtype::bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace
}  // namespace switchyard::testing::cuda_allocation_test
