// SPDX-License-Identifier: Apache-2.0
// Ranks on one GPU of which one never comes, or fails: the others do not wait for ever.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "device/cuda/layer_fixture.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::testing::cuda_ranks_failure_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 4;
constexpr int kLost = 2;

void expect_all_nan(const Tensor& tensor) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(tensor.shape().num_elements()); ++i) {
    const float value = tensor.dtype() == Dtype::f32 ? tensor.span<float>()[i]
                                                     : to_float(tensor.span<Bfloat16>()[i]);
    if (!std::isnan(value)) {
      ADD_FAILURE() << "element " << i << " is " << value;
      return;
    }
  }
}

void expect_error(const std::function<void()>& call, std::string_view words) {
  const auto message = error_of<CommunicationError>(call);
  EXPECT_NE(message.find(words), std::string::npos) << message;
}

// Counts the other ranks.
class Others {
 public:
  void release() { count_.release(); }
  void expect_all() {
    bool came = true;
    for (int i = 0; i < kRanks - 1; ++i) came = came && count_.try_acquire_for(30s);
    EXPECT_TRUE(came);
  }

 private:
  std::counting_semaphore<kRanks> count_{0};
};

// Whether the step is eager or a replay.
class CudaRanksFailure : public ::testing::TestWithParam<std::tuple<bool, Dtype>> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static bool replays() { return std::get<0>(GetParam()); }
  static MoeLayerOptions options() {
    return graph_options(std::get<1>(GetParam()), rows_of(kRanks));
  }

  // The results of a correct step, on every rank.
  std::vector<std::vector<Tensor>> expected_ = std::vector<std::vector<Tensor>>(kRanks);

  // Calls body on every rank after a sound step, which a graph was captured of.
  void after_a_step(std::chrono::milliseconds timeout,
                    const std::function<void(LayerFixture&, const CapturedGraph&)>& body) {
    on_gpu_ranks(
        kRanks,
        [&](Communicator& comm, const Device& device) {
          LayerFixture f(options(), device, comm);
          f.set(f.own_routings()[0], 1);
          f.train();
          auto& expected = expected_[static_cast<std::size_t>(comm.rank())];
          if (expected.empty()) {
            expected = f.results();
          } else {
            expect_same_tensors(f.results(), expected);
          }
          f.all_done();
          const CapturedGraph graph(device, [&] { f.train(); });
          f.all_done();
          body(f, graph);
        },
        timeout);
  }
  void expect_that_a_new_group_works() {
    after_a_step(20s, [&](LayerFixture& f, const CapturedGraph& graph) {
      device_step(f, graph);
      expect_same_tensors(f.results(), expected_[static_cast<std::size_t>(f.comm->rank())]);
      f.all_done();
    });
  }
  static void device_step(LayerFixture& f, const CapturedGraph& graph) {
    replays() ? graph.replay() : f.train();
  }
};

TEST_P(CudaRanksFailure, ARankThatNeverComesIsNamedAfterTheTimeout) {
  constexpr auto kTimeout = 1s;
  Others ended;
  after_a_step(kTimeout, [&](LayerFixture& f, const CapturedGraph& graph) {
    constexpr std::string_view kWords = "rank 2 did not come to";
    if (f.comm->rank() == kLost) {
      ended.expect_all();
      expect_error([&] { f.layer.check(); }, kWords);
      return;
    }
    const auto begin = Clock::now();
    device_step(f, graph);
    expect_error([&] { f.layer.check(); }, kWords);
    const auto waited = Clock::now() - begin;
    EXPECT_GE(waited, kTimeout * 8 / 10);
    EXPECT_LE(waited, kTimeout + 4s);
    expect_all_nan(f.device.to_host(f.y));
    expect_all_nan(f.device.to_host(f.d_x));
    expect_error([&] { f.train(); }, kWords);
    expect_error([&] { graph.replay(); }, kWords);
    const auto gone = error_of<CommunicationError>([&] { f.comm->barrier(); });
    EXPECT_NE(gone, "no error");
    ended.release();
  });
  expect_that_a_new_group_works();
}

// The ranks that wait are told why, long before their timeout.
TEST_P(CudaRanksFailure, AnErrorOfOneRankEndsTheWaitsOfTheOthers) {
  constexpr std::string_view kReason = "there is a hole in the bucket";
  Others waiting;
  const auto run = [&] {
    after_a_step(20s, [&](LayerFixture& f, const CapturedGraph& graph) {
      MoeLayer* const layers[] = {&f.layer};
      if (f.comm->rank() == kLost) {
        waiting.expect_all();
        run_step(layers, [&] { throw std::runtime_error(std::string(kReason)); });
      }
      const auto begin = Clock::now();
      device_step(f, graph);
      waiting.release();
      expect_error([&] { f.layer.check(); }, kReason);
      EXPECT_LE(Clock::now() - begin, 2s);
      expect_error([&] { graph.replay(); }, kReason);
      expect_all_nan(f.device.to_host(f.y));
    });
  };
  EXPECT_EQ(error_of<std::runtime_error>(run), kReason);
  expect_that_a_new_group_works();
}

// Its layer is gone before anybody catches the error.
TEST_P(CudaRanksFailure, AnErrorThatTakesALayerAlongEndsTheWaitsOfTheOthers) {
  Others waiting;
  const auto run = [&] {
    after_a_step(8s, [&](LayerFixture& f, const CapturedGraph& graph) {
      if (f.comm->rank() == kLost) {
        waiting.expect_all();
        throw std::runtime_error("there is a hole in the bucket");
      }
      const auto begin = Clock::now();
      device_step(f, graph);
      waiting.release();
      expect_error([&] { f.layer.check(); }, "rank 2");
      EXPECT_LE(Clock::now() - begin, 2s);
    });
  };
  EXPECT_EQ(error_of<std::runtime_error>(run), "there is a hole in the bucket");
  expect_that_a_new_group_works();
}

INSTANTIATE_TEST_SUITE_P(CudaRanks, CudaRanksFailure,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param) ? "replayed_" : "eager_") +
                                  std::string(name_of(std::get<1>(param.param)));
                         });

}  // namespace
}  // namespace switchyard::testing::cuda_ranks_failure_test
