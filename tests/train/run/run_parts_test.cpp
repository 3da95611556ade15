// Sums over ranks, and wishes to stop.
#include <gtest/gtest.h>

#include <csignal>
#include <vector>

#include "common/sum_over_ranks.h"
#include "run/stop_signals.h"
#include "switchyard/run_ranks.h"

namespace switchyard::run_parts_test {
namespace {

TEST(SumOverRanks, AddsInRankOrder) {
  run_ranks(3, [](Communicator& world) {
    const std::vector<double> own{1e16 * (world.rank() == 0 ? 1 : 0), double(world.rank()), 0.5};
    const auto sums = train::sum_over_ranks(world, own);
    EXPECT_EQ(sums, (std::vector<double>{1e16, 3.0, 1.5}));
    EXPECT_TRUE(train::sum_over_ranks(world, {}).empty());
  });
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
}  // namespace switchyard::run_parts_test
