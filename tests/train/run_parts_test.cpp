// Sums over ranks, errors of rank 0, and wishes to stop.
#include <gtest/gtest.h>

#include <csignal>
#include <stdexcept>
#include <string>
#include <vector>

#include "on_rank_0.h"
#include "stop_signals.h"
#include "sum_over_ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard {
namespace {

TEST(SumOverRanks, AddsInRankOrder) {
  run_ranks(3, [](Communicator& world) {
    const std::vector<double> own{1e16 * (world.rank() == 0 ? 1 : 0), double(world.rank()), 0.5};
    const auto sums = train::sum_over_ranks(world, own);
    EXPECT_EQ(sums, (std::vector<double>{1e16, 3.0, 1.5}));
    EXPECT_TRUE(train::sum_over_ranks(world, {}).empty());
  });
}

template <typename Exception>
void expect_everywhere(const std::string& message, const std::function<void()>& fn) {
  run_ranks(3, [&](Communicator& world) {
    try {
      train::on_rank_0(world, fn);
      ADD_FAILURE() << "no error";
    } catch (const Exception& error) {
      EXPECT_EQ(error.what(), message);
    }
    world.barrier();  // still usable
  });
}

TEST(OnRank0, ItsErrorIsEverybodys) {
  expect_everywhere<StorageError>("no room on \xc3\xa4",
                                  [] { throw StorageError("no room on \xc3\xa4"); });
  expect_everywhere<InvalidArgument>("odd", [] { throw std::runtime_error("odd"); });
  int calls = 0;
  run_ranks(3, [&](Communicator& world) { train::on_rank_0(world, [&] { ++calls; }); });
  EXPECT_EQ(calls, 1);
}

TEST(StopSignals, TheFirstIsNotedAndTheSecondAsEver) {
  struct sigaction during {};
  {
    const train::StopSignals outer;
    {
      const train::StopSignals inner;
      EXPECT_FALSE(inner.received());
      std::raise(SIGTERM);
      EXPECT_TRUE(inner.received());
    }
    EXPECT_TRUE(outer.received());
    sigaction(SIGTERM, nullptr, &during);
    EXPECT_EQ(during.sa_handler, SIG_DFL);
    sigaction(SIGINT, nullptr, &during);
    EXPECT_NE(during.sa_handler, SIG_DFL);
  }
  sigaction(SIGINT, nullptr, &during);
  EXPECT_EQ(during.sa_handler, SIG_DFL);
}

}  // namespace
}  // namespace switchyard
