// SPDX-License-Identifier: Apache-2.0
// Ranks with a short deadline on a machine that is busy with other work raise no false alarm.
// SWITCHYARD_TEST_LOAD=8 starts that many times as many busy threads as there are cores; without it
// there are no such tests.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>
#include <vector>

#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "switchyard/run_ranks.h"

namespace switchyard::loaded_machine_test {
namespace {

using namespace std::chrono_literals;
using testing::gradients_for;
using testing::Random;
using testing::RankCase;

constexpr auto kTimeout = 5s;
constexpr auto kDuration = 10s;

int load() {
  const char* const chosen = std::getenv("SWITCHYARD_TEST_LOAD");
  return chosen != nullptr ? std::atoi(chosen) : 0;
}

std::vector<RankCase> cases() {
  return load() > 0 ? testing::rank_cases() : std::vector<RankCase>();
}

// Keeps cores busy while it lives: this process's share, where ranks are processes.
class BusyThreads {
 public:
  explicit BusyThreads(int processes) {
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    for (int i = 0; i < (load() * cores + processes - 1) / processes; ++i) {
      threads_.emplace_back([this] {
        while (!stops_.load(std::memory_order_relaxed)) continue;
      });
    }
  }
  ~BusyThreads() {
    stops_ = true;
    for (auto& thread : threads_) thread.join();
  }
  BusyThreads(const BusyThreads&) = delete;
  BusyThreads& operator=(const BusyThreads&) = delete;

 private:
  std::atomic<bool> stops_ = false;
  std::vector<std::thread> threads_;
};

// Steps of every mover, until the time is over for rank 0.
void train(Communicator& comm) {
  const auto placement = ExpertPlacement::contiguous(6, comm.size());
  const auto end = std::chrono::steady_clock::now() + kDuration;
  auto options = testing::tiny_layer_options();
  const auto weights = testing::tiny_layer_weights(options, placement, comm.rank());
  const auto gradients = gradients_for(weights);
  Random random(static_cast<std::uint64_t>(comm.rank()));
  std::int64_t num_steps = 0;
  for (bool goes_on = true; goes_on; ++num_steps) {
    for (const MoverKind mover : testing::movers_of(comm)) {
      options.mover = mover;
      MoeLayer layer(comm, placement, options);
      const Tensor x = random.tensor({random.below(50), options.hidden}, Dtype::f32);
      Tensor d_x(x.shape(), Dtype::f32);
      SavedForBackward saved;
      const Tensor y = layer.forward(weights, {.x = x}, saved);
      layer.backward(weights, saved, y, {.d_x = d_x, .gradients = gradients});
    }
    Tensor is_time = Tensor::from<std::int32_t>({1}, {std::chrono::steady_clock::now() < end});
    comm.broadcast(is_time, 0);
    goes_on = is_time.span<std::int32_t>()[0] != 0;
  }
  if (comm.rank() == 0) std::cout << num_steps << " steps of each mover\n";
}

class LoadedMachine : public ::testing::TestWithParam<RankCase> {};

TEST_P(LoadedMachine, RaisesNoFalseAlarm) {
  const RankCase& ranks = GetParam();
  if (ranks.backend == "threads") {
    const BusyThreads busy(1);
    EXPECT_NO_THROW(run_ranks(ranks.size, train, {.timeout = kTimeout}));
    return;
  }
  const auto world = connect({.backend = ranks.backend, .timeout = kTimeout});
  const BusyThreads busy(ranks.size);
  EXPECT_NO_THROW(train(*world));
  EXPECT_NO_THROW(world->barrier());
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoadedMachine);
INSTANTIATE_TEST_SUITE_P(Ranks, LoadedMachine, ::testing::ValuesIn(cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::loaded_machine_test
