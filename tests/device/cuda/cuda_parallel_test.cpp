// SPDX-License-Identifier: Apache-2.0
// The functions around a layer on a GPU's tensors, with ranks that are threads.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "device/cuda/layer_fixture.h"
#include "peer/device_collectives.h"
#include "support/device/parallel_checks.h"
#include "support/shared_folder.h"
#include "switchyard/parallelize.h"
#include "switchyard/sequence.h"

namespace switchyard::testing::cuda_parallel_test {
namespace {

class CudaParallel : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  // Twice, so that what is kept is used again.
  static void on_ranks(const std::function<void(Communicator&, const Device&)>& body) {
    on_gpu_ranks(GetParam(), [&](Communicator& comm, const Device& device) {
      for (int round = 0; round < 2; ++round) {
        body(comm, device);
        all_done(comm, device);
      }
    });
  }
};

TEST_P(CudaParallel, SequencesAreGatheredAndSliced) { on_ranks(expect_sequences_as_on_cpu); }

TEST_P(CudaParallel, CombineSequenceGivesTheWhole) { on_ranks(expect_combine_sequence_as_on_cpu); }

TEST_P(CudaParallel, GradientsAreAdded) { on_ranks(expect_sums_of_gradients_as_on_cpu); }

TEST_P(CudaParallel, ExpertsMoveToOtherRanks) { on_ranks(expect_reshard_as_on_cpu); }

TEST_P(CudaParallel, ModelsAreDivided) { on_ranks(expect_division_as_on_cpu); }

TEST_P(CudaParallel, CheckpointsAreSavedAndLoaded) {
  SharedFolder folder;
  on_ranks([&](Communicator& comm, const Device& device) {
    expect_checkpoints_as_on_cpu(comm, device, folder.path(comm));
  });
}

// Several pieces of staging and the end of one, in both dtypes, with and without peer memory.
TEST_P(CudaParallel, LargeTensorsGoInPieces) {
  using Way = DeviceCollectives::Way;
  on_ranks([](Communicator& comm, const Device& device) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const auto seed = static_cast<std::uint64_t>(comm.rank());
      const Tensor part = Random(seed).tensor({(1 << 18) + 77}, dtype);
      Tensor expected = part.clone();
      comm.all_reduce(expected);
      for (const Way way : {Way::communicator, Way::peer_memory}) {
        const DeviceCollectives collectives(comm, device, way, 1 << 16);
        Tensor sum = device.copy_of(part);
        const TensorView view = sum;
        collectives.all_reduce({&view, 1});
        EXPECT_TRUE(same_bits(device.to_host(sum), expected));
        all_done(comm, device);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(CudaParallel, CudaParallel, ::testing::Values(1, 2, 4),
                         [](const auto& param) { return std::to_string(param.param) + "_ranks"; });

TEST(CudaParallelAlone, WeightsAreTransposed) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  expect_conversions_as_on_cpu(Device::cuda(cuda_options()));
}

TEST(CudaParallelAlone, BiasesFollowTheCounts) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  expect_balancing_as_on_cpu(Device::cuda(cuda_options()));
}

// The hosts give their GPUs work and wait for none of it.
TEST(CudaParallelAlone, SumsOfGradientsAndSequencesWaitForNoGpu) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  on_gpu_ranks(2, [](Communicator& comm, const Device& device) {
    Mesh mesh(comm, {{"dp", 2}});
    const SequenceShard shard(1, 64, 2, comm.rank());
    const Tensor local = device.copy_of(Random(1).tensor({32, 64}, Dtype::bf16));
    const Tensor d_full = device.copy_of(Random(2).tensor({1, 64, 64}, Dtype::bf16));
    Tensor gradient = device.copy_of(Random(3).tensor({64, 64}, Dtype::f32));
    const std::vector<TensorView> gradients{gradient};
    for (int round = 0; round < 3; ++round) {  // the first makes what is kept
      const auto before = device.host_syncs();
      const Tensor full = gather_sequence(comm, shard, local, device);
      const Tensor d_local = gather_sequence_backward_sum(comm, shard, d_full, device);
      reduce_replicated(gradients, mesh, {}, device);
      EXPECT_TRUE(round == 0 || device.host_syncs() == before);
    }
    all_done(comm, device);
  });
}

}  // namespace
}  // namespace switchyard::testing::cuda_parallel_test
