// SPDX-License-Identifier: Apache-2.0
// Runs of many steps keep the memory and the descriptors that they had. SWITCHYARD_STEPS=100000
// makes so many.
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/layer/layer_alone.h"
#include "support/ranks.h"

namespace switchyard::long_run_test {
namespace {

using testing::gradients_for;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;

#ifdef SWITCHYARD_SANITIZED
constexpr std::int64_t kSteps = 200;
#else
constexpr std::int64_t kSteps = 1500;
#endif
constexpr std::int64_t kMostGrowth = 1 << 20;  // bytes

std::int64_t num_steps() {
  const char* const chosen = std::getenv("SWITCHYARD_STEPS");
  return chosen != nullptr ? std::atoll(chosen) : kSteps;
}

std::int64_t resident_bytes() {
  ::malloc_trim(0);
  std::int64_t total = 0;
  std::int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

std::int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// Collective: what a tenth of the rounds have taken is all that all of them take.
void expect_flat(Communicator& comm, std::int64_t rounds, const std::function<void()>& round) {
  std::int64_t bytes = 0;
  std::int64_t descriptors = 0;
  for (std::int64_t i = 0; i < rounds; ++i) {
    if (i == rounds / 10) {
      comm.barrier();
      if (comm.rank() == 0) bytes = resident_bytes();
      if (comm.rank() == 0) descriptors = open_descriptors();
      comm.barrier();
    }
    round();
  }
  comm.barrier();
  if (comm.rank() == 0) {
    const std::int64_t growth = resident_bytes() - bytes;
#ifndef SWITCHYARD_SANITIZED  // which keeps what was freed
    EXPECT_LT(growth, kMostGrowth) << "over " << rounds << " rounds";
#endif
    ::testing::Test::RecordProperty("growth", std::to_string(growth));
    EXPECT_EQ(open_descriptors(), descriptors);
  }
  comm.barrier();
}

MoeLayerOptions layer_options(MoverKind mover) {
  MoeLayerOptions options = testing::tiny_layer_options();
  options.mover = mover;
  return options;
}

class LongRun : public ::testing::TestWithParam<RankCase> {};

TEST_P(LongRun, MemoryStaysFlatOverSteps) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto placement = ExpertPlacement::contiguous(6, comm.size());
    for (const MoverKind mover : testing::movers_of(comm)) {
      auto options = layer_options(mover);
      options.losses = {.balance = BalanceLoss::batch, .z = true};
      options.sizing = Sizing::bounded(64);
      MoeLayer layer(comm, placement, options);
      const auto weights = testing::tiny_layer_weights(options, placement, comm.rank());
      const auto gradients = gradients_for(weights);
      Random random(static_cast<std::uint64_t>(comm.rank()));
      std::array<MoeLayer*, 1> layers{&layer};
      expect_flat(comm, num_steps(), [&] {
        const Tensor x = random.tensor({random.below(8), options.hidden}, Dtype::f32);
        Tensor d_x(x.shape(), Dtype::f32);
        run_step(layers, [&] {
          SavedForBackward saved;
          const Tensor y = layer.forward(weights, {.x = x}, saved);
          layer.backward(weights, saved, {.d_y = y, .d_losses = {.balance = 0.01F, .z = 0.01F}},
                         {.d_x = d_x, .gradients = gradients});
        });
      });
    }
  });
}

TEST_P(LongRun, MemoryStaysFlatOverCollectives) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const std::int64_t size = comm.size();
    Random random(7);  // alike on all ranks
    expect_flat(comm, 2 * num_steps(), [&] {
      const std::int64_t n = 1 + random.below(600);
      Tensor values = Tensor::zeros({size, n}, Dtype::i32);
      Tensor all({size * size, n}, Dtype::i32);
      const std::vector<std::int64_t> one_each(static_cast<std::size_t>(size), 1);
      comm.all_gather(values, all);
      comm.all_reduce(values);
      comm.broadcast(values, 0);
      comm.all_to_all(values, one_each, all.view().slice(0, size), one_each);
    });
  });
}

TEST_P(LongRun, MemoryStaysFlatAsLayersAndGroupsComeAndGo) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto placement = ExpertPlacement::contiguous(6, comm.size());
    Random random(7);
    expect_flat(comm, num_steps() / 10, [&] {
      const auto movers = testing::movers_of(comm);
      const auto mover = movers[static_cast<std::size_t>(random.below(std::ssize(movers)))];
      const auto group = comm.split(0, comm.rank());
      const MoeLayer over_group(*group, placement, layer_options(mover));
      const MoeLayer over_all(comm, placement, layer_options(mover));
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LongRun, ::testing::ValuesIn(testing::rank_cases_of(2)),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::long_run_test
