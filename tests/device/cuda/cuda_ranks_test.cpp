// SPDX-License-Identifier: Apache-2.0
// Several ranks that are threads on one GPU: graphs that all replay together, steps that are run
// again, and what nobody waits for.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <tuple>

#include "device/cuda/gate.h"
#include "device/cuda/layer_forms.h"
#include "peer/peer_memory.h"

namespace switchyard::testing::cuda_ranks_test {
namespace {

constexpr int kRanks = 4;

class CudaRanksForms : public ::testing::TestWithParam<std::tuple<Form, Dtype>> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static MoeLayerOptions options() {
    return options_of(std::get<0>(GetParam()), std::get<1>(GetParam()), kRanks);
  }
};

TEST_P(CudaRanksForms, ReplayedWithOtherRoutingsEqualsEager) {
  on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
    expect_form_replays(std::get<0>(GetParam()), options(), device, comm);
  });
}

TEST_P(CudaRanksForms, TwoLayersInOneGraphEqualEager) {
  on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
    expect_two_layers_equal_eager(options(), device, comm);
  });
}

INSTANTIATE_TEST_SUITE_P(CudaRanks, CudaRanksForms,
                         ::testing::Combine(::testing::ValuesIn(all_forms()),
                                            ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& param) {
                           return std::get<0>(param.param).name + "_" +
                                  std::string(name_of(std::get<1>(param.param)));
                         });

// Opens gates that a defect would leave shut for good.
class Watchdog {
 public:
  explicit Watchdog(std::span<Gate> gates)
      : thread_([this, gates](const std::stop_token& stop) {
          std::unique_lock lock(mutex_);
          ended_.wait_for(lock, stop, std::chrono::seconds(30), [] { return false; });
          for (Gate& gate : gates) gate.open();
        }) {}

 private:
  std::mutex mutex_;
  std::condition_variable_any ended_;
  std::jthread thread_;
};

class CudaRanks : public ::testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  // With everything that ranks have to tell each other.
  static MoeLayerOptions options(const Sizing& sizing) {
    auto options = graph_options(GetParam(), 1);
    options.gradient_scale = GradientScale::global;
    options.capacity = {.factor = 1.5};
    options.sizing = sizing;
    return options;
  }
};

TEST_P(CudaRanks, AStepAndAReplayReturnBeforeTheirStreamsRun) {
  std::array<Gate, 2> gates;  // of all ranks
  const Watchdog watchdog(gates);
  on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
    LayerFixture f(options(Sizing::bounded(rows_of(kRanks))), device, comm);
    f.set(f.own_routings()[0], 1);
    f.train();
    f.all_done();
    const CapturedGraph graph(device, [&] { f.train(); });
    f.all_done();
    graph.replay();
    const auto expected = f.results();
    f.train();  // so that it finds memory besides the graph's
    for (const bool replays : {false, true}) {
      SCOPED_TRACE(replays ? "a replay" : "a step");
      Gate& gate = gates[replays ? 1 : 0];
      device.set_zero(f.y);
      device.set_zero(f.d_x);
      f.all_done();
      gate.close(device.stream());
      replays ? graph.replay() : f.train();
      EXPECT_FALSE(gate.is_open()) << "it waits";
      EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(device.stream().handle)),
                cudaErrorNotReady)
          << "the gate holds nothing up";
      comm.barrier();
      gate.open();
      expect_same_tensors(f.results(), expected);
    }
    f.all_done();
  });
}

// Sums over the batch go through its ranks' memory, whether or not these share experts.
TEST_P(CudaRanks, ABatchOfSeveralGroupsIsCaptured) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  auto with_sums = options(Sizing::bounded(rows_of(kRanks)));
  with_sums.gradient_scale = GradientScale::global;
  on_gpu_ranks(kRanks, [&](Communicator& world, const Device& device) {
    for (const int ranks_of_group : {1, 2}) {
      SCOPED_TRACE(ranks_of_group);
      const auto group = world.split(world.rank() / ranks_of_group, world.rank());
      LayerFixture replayed(with_sums, device, *group, &world);
      LayerFixture eager(with_sums, device, *group, &world);
      expect_replays_equal_eager(replayed, eager, [] {});
    }
  });
}

// One rank's heap grows while the GPUs of the others wait for it in a meeting.
TEST_P(CudaRanks, AHeapGrowsWhileOthersWait) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
    const auto memory = PeerMemory::of(comm, device);
    const PeerMeetings meetings(memory, 0);
    for (std::int64_t round = 0; round < 3; ++round) {
      TensorView large;
      if (comm.rank() == kRanks - 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        large = memory->take({(std::int64_t{9} << 20) << round}, Dtype::i64);
      }
      meetings.close();
      device.synchronize();
      meetings.check();
    }
    all_done(comm, device);
  });
}

TEST_P(CudaRanks, OnlyAnExactForwardWaits) {
  for (const bool bounded : {true, false}) {
    SCOPED_TRACE(bounded ? "bounded" : "exact");
    on_gpu_ranks(kRanks, [&](Communicator& comm, const Device& device) {
      LayerFixture f(options(bounded ? Sizing::bounded(rows_of(kRanks)) : Sizing::exact()), device,
                     comm);
      f.set(f.own_routings()[0], 1);
      for (int round = 0; round < 3; ++round) {  // the first takes memory
        const auto before = device.host_syncs();
        SavedForBackward saved;
        f.forward(saved);
        const auto after_forward = device.host_syncs();
        f.backward(saved);
        const auto after_backward = device.host_syncs();
        if (round == 0) continue;
        EXPECT_EQ(after_forward - before, bounded ? 0 : 1) << "rank " << comm.rank();
        EXPECT_EQ(after_backward - after_forward, 0) << "rank " << comm.rank();
      }
      EXPECT_NO_THROW(f.layer.check());
      f.all_done();
    });
  }
}

// Rows that find no room, tokens that find none, and both.
class CudaRanksOverflow : public ::testing::TestWithParam<std::tuple<bool, Dtype>> {};

TEST_P(CudaRanksOverflow, RunStepRunsItAgainExactly) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  const auto [replays, dtype] = GetParam();
  const std::int64_t rows = rows_of(kRanks);
  for (const Sizing& sizing :
       {Sizing::bounded(96), Sizing::bounded(rows, Overflow::fail, rows / kTopK - 1),
        Sizing::bounded(96, Overflow::fail, 40)}) {
    SCOPED_TRACE(std::to_string(sizing.capacity()) + " rows");
    on_gpu_ranks(
        kRanks, [&, dtype = dtype, replays = replays](Communicator& comm, const Device& device) {
          auto options = graph_options(dtype, 1);
          options.sizing = sizing;
          LayerFixture f(options, device, comm);
          options.sizing = Sizing::exact();
          LayerFixture exact(options, device, comm);
          const auto all = f.own_routings();
          const Tensor& few = all[9];
          const Tensor& to_one_rank = all[7];
          f.set(few, 1);
          f.train();
          f.all_done();
          std::optional<CapturedGraph> graph;
          if (replays) graph.emplace(device, [&] { f.train(); });
          f.layer.take_pick_counts();
          f.set(to_one_rank, 2);
          exact.set(to_one_rank, 2);
          exact.train();
          MoeLayer* const layers[] = {&f.layer};
          EXPECT_TRUE(run_step(layers, [&] {
            if (graph && f.layer.options().sizing.is_bounded()) {
              graph->replay();
            } else {
              f.train();
            }
          }));
          const Sizing& grown = f.layer.options().sizing;
          EXPECT_GE(grown.capacity(), rows);
          EXPECT_GE(grown.token_capacity(), rows / kTopK);
          const auto expected = exact.results();
          expect_same_tensors(f.results(), expected);
          EXPECT_EQ(f.layer.take_pick_counts().picks, exact.layer.take_pick_counts().picks);

          device.set_zero(f.y);
          EXPECT_FALSE(run_step(layers, [&] { f.train(); }));  // there is room now
          EXPECT_NO_THROW(f.layer.check());
          expect_same_tensors(f.results(), expected);
          f.all_done();
        });
  }
}

INSTANTIATE_TEST_SUITE_P(CudaRanks, CudaRanks, ::testing::Values(Dtype::f32, Dtype::bf16),
                         [](const auto& param) { return std::string(name_of(param.param)); });
INSTANTIATE_TEST_SUITE_P(CudaRanks, CudaRanksOverflow,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param) ? "replayed_" : "eager_") +
                                  std::string(name_of(std::get<1>(param.param)));
                         });

}  // namespace
}  // namespace switchyard::testing::cuda_ranks_test
