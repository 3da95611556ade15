// SPDX-License-Identifier: Apache-2.0
// The functions around a layer with tensors of a GPU's memory, of which the host only pretends to
// know nothing; tests/device/cuda/cuda_parallel_test.cpp does the same on a real one.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>

#include "support/compare.h"
#include "support/device/parallel_checks.h"
#include "support/device/pretend_gpu.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/ranks.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"
#include "switchyard/load_balancer.h"
#include "switchyard/parallelize.h"
#include "switchyard/reshard.h"
#include "switchyard/run_ranks.h"
#include "switchyard/sequence.h"

namespace switchyard::testing::gpu_tensors_test {
namespace {

using Peers = PretendGpu::Peers;

// Ranks that reach each other's memory, and ranks whose hosts stage everything.
class GpuTensors : public ::testing::TestWithParam<std::tuple<int, Peers>> {
 protected:
  static void on_ranks(const std::function<void(Communicator&, const Device&)>& body) {
    const auto [num_ranks, peers] = GetParam();
    run_ranks(num_ranks,
              [&, peers = peers](Communicator& comm) { body(comm, PretendGpu::device(peers)); },
              {.timeout = kTestTimeout});
  }
};

TEST_P(GpuTensors, SequencesAreGatheredAndSliced) { on_ranks(expect_sequences_as_on_cpu); }

TEST_P(GpuTensors, GradientsAreAdded) { on_ranks(expect_sums_of_gradients_as_on_cpu); }

TEST_P(GpuTensors, ExpertsMoveToOtherRanks) { on_ranks(expect_reshard_as_on_cpu); }

TEST_P(GpuTensors, ModelsAreDivided) { on_ranks(expect_division_as_on_cpu); }

TEST_P(GpuTensors, CheckpointsAreSavedAndLoaded) {
  const Folder folder;
  on_ranks([&](Communicator& comm, const Device& device) {
    expect_checkpoints_as_on_cpu(comm, device, folder.path());
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, GpuTensors,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(Peers::reached, Peers::apart)),
                         [](const auto& param) {
                           const bool reached = std::get<1>(param.param) == Peers::reached;
                           return std::to_string(std::get<0>(param.param)) +
                                  (reached ? "_ranks_reached" : "_ranks_apart");
                         });

TEST(GpuTensorsAlone, WeightsAreTransposed) {
  expect_conversions_as_on_cpu(PretendGpu::device(Peers::apart));
}

TEST(GpuTensorsAlone, BiasesFollowTheCounts) {
  expect_balancing_as_on_cpu(PretendGpu::device(Peers::apart));
}

// More than is staged at a time, in rows that do not divide it.
TEST(GpuTensorsAlone, ALargeTensorIsSavedInPieces) {
  const Folder folder;
  const Device device = PretendGpu::device(Peers::apart);
  Tensor large({(33 << 20) / 4096, 1025}, Dtype::f32);
  for (std::size_t i = 0; i < large.span<float>().size(); ++i) {
    large.span<float>()[i] = static_cast<float>(i);
  }
  const auto comm = connect();
  save_checkpoint(*comm, folder / "large",
                  {.tensors = {{"large", device.copy_of(large)}}, .device = device});
  const auto saved = switchyard::Checkpoint::open(folder / "large").tensor("large");
  EXPECT_TRUE(same_bits(saved, large));
}

// A device that is not theirs: an error that says where the tensor is and where the device works.
TEST(GpuTensorsErrors, NameTheTensorAndBothMemories) {
  const auto comm = connect();
  const Device gpu = PretendGpu::device(Peers::apart);
  const std::string rest =
      " is in host memory, but the device works in gpu memory; copy it with Device::copy_of";
  const SequenceShard shard(2, 3, 1, 0);
  const Tensor local({6, 4}, Dtype::f32);
  const Tensor full({2, 3, 4}, Dtype::f32);
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)gather_sequence(*comm, shard, local, gpu); }),
            "gather_sequence: local [6,4]" + rest);
  EXPECT_EQ(
      error_of<InvalidArgument>([&] { (void)gather_sequence_backward_slice(shard, full, gpu); }),
      "d_full [2,3,4]" + rest);
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { (void)gather_sequence_backward_sum(*comm, shard, full, gpu); }),
            "gather_sequence_backward_sum: d_full [2,3,4]" + rest);
  Tensor bias({4}, Dtype::f32);
  const std::vector<std::int64_t> counts{1, 2, 3, 4};
  EXPECT_EQ(error_of<InvalidArgument>([&] { LoadBalancer(4).update(counts, 0, bias, gpu); }),
            "score_bias [4]" + rest);
  EXPECT_EQ(error_of<InvalidArgument>([&] { LoadBalancer(4).update(counts, 0, elsewhere(bias)); }),
            "score_bias [4]" + std::string(kGivenToTheCpu));
  const auto one = ExpertPlacement::contiguous(6, 1);
  const std::vector<ConstTensorView> experts{local};
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)reshard(experts, one, one, *comm, gpu); }),
            "reshard: rank 0: tensor 0 [6,4]" + rest);
}

// Ranks that would go other ways learn so before they move anything.
TEST(GpuTensorsErrors, RanksInOtherMemoriesAreTold) {
  run_ranks(
      2,
      [](Communicator& comm) {
        const Device device = comm.rank() == 0 ? Device() : PretendGpu::device(Peers::reached);
        Tensor values = device.empty({4}, Dtype::f32);
        Mesh mesh(comm, {{"dp", 2}});
        const std::string both =
            "ranks disagree about the memory of their devices, 0 for the host's: rank 0 has "
            "0, rank 1 has 1";
        const std::vector<TensorView> gradients{values};
        EXPECT_EQ(
            error_of<InvalidArgument>([&] { reduce_replicated(gradients, mesh, {}, device); }),
            "reduce_replicated: " + both);
        const auto to_one = ExpertPlacement::from_owners({0, 0, 0, 0, 0, 0, 0, 0}, 2);
        const auto even = ExpertPlacement::contiguous(8, 2);
        const std::vector<ConstTensorView> experts{values};
        EXPECT_EQ(
            error_of<InvalidArgument>([&] { (void)reshard(experts, even, to_one, comm, device); }),
            "reshard: " + both);
      },
      {.timeout = kTestTimeout});
}

}  // namespace
}  // namespace switchyard::testing::gpu_tensors_test
