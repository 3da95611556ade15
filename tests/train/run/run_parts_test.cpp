// SPDX-License-Identifier: Apache-2.0
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

bool has_handler(int number) {
  struct sigaction now {};
  sigaction(number, nullptr, &now);
  return now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN;
}

TEST(StopSignals, AreRecordedWhileHandlersAreInstalled) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    const train::StopSignals outer;
    {
      const train::StopSignals inner;
      EXPECT_FALSE(inner.received());
      std::raise(number);
      EXPECT_TRUE(inner.received());
    }
    EXPECT_TRUE(outer.received());
    std::raise(number);  // twice is once
    EXPECT_TRUE(has_handler(SIGINT) && has_handler(SIGTERM) && has_handler(SIGHUP));
  }
  EXPECT_FALSE(has_handler(SIGINT) || has_handler(SIGTERM) || has_handler(SIGHUP));
}

TEST(StopSignals, ABrokenPipeIsNotAStopSignal) {
  const train::StopSignals signals;
  std::raise(SIGPIPE);
  EXPECT_FALSE(signals.received());
}

TEST(StopSignals, IgnoredHangupsStayIgnored) {
  std::signal(SIGHUP, SIG_IGN);
  {
    const train::StopSignals signals;
    std::raise(SIGHUP);
    EXPECT_FALSE(signals.received());
  }
  EXPECT_EQ(std::signal(SIGHUP, SIG_DFL), SIG_IGN);
}

}  // namespace
}  // namespace switchyard::run_parts_test
