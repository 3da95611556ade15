// SPDX-License-Identifier: Apache-2.0
// Something goes wrong on one of four ranks, at one collective of a training step after the other:
// either all results are right, or every rank has an error that names somebody, and afterwards a
// new group works.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/failure_listener.h"
#include "support/faulty_communicator.h"
#include "support/training_step.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::fault_walk_test {
namespace {

using namespace std::chrono_literals;
using testing::Fault;
using testing::FaultPlan;

constexpr int kRanks = 4;
constexpr int kVictim = 2;

struct RankOutcome {
  std::optional<std::int64_t> hash = {};
  std::string error = {};
  std::vector<int> named = {};
};

struct StepOutcome {
  std::vector<RankOutcome> ranks = std::vector<RankOutcome>(kRanks);
  std::vector<std::string> calls;  // of the victim
};

class FaultWalkTest : public ::testing::TestWithParam<MoverKind> {
 protected:
  FaultWalkTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("switchyard-faults-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~FaultWalkTest() override { std::filesystem::remove_all(folder_); }

  StepOutcome run(Fault fault, int call) const {
    StepOutcome outcome;
    std::atomic<int> num_ended = 0;
    // A rank that has lost a message may wait in another group than the rest.
    const bool meets_deadline =
        fault == Fault::silence || fault == Fault::drop || fault == Fault::duplicate;
    const std::chrono::milliseconds timeout = meets_deadline ? 2s : 60s;
    run_ranks(kRanks,
              [&](Communicator& comm) {
                const auto plan = std::make_shared<FaultPlan>();
                if (comm.rank() == kVictim) {
                  plan->fault = fault;
                  plan->at_call = call;
                  plan->be_silent = [&] {
                    while (num_ended < kRanks - 1) std::this_thread::sleep_for(1ms);
                  };
                }
                outcome.ranks[static_cast<std::size_t>(comm.rank())] = run_rank(comm, plan);
                if (comm.rank() == kVictim) outcome.calls = plan->calls;
                ++num_ended;
              },
              {.timeout = timeout});
    return outcome;
  }

  // Each kind of call goes wrong under one mover, unless the walk is whole.
  static bool is_of_mover(const std::string& operation) {
    if (GetParam() == MoverKind::packed) return true;
    if (GetParam() == MoverKind::peer) return operation == "barrier";
    return operation == "map" || operation == "phase_barrier";
  }

  // Fails the test unless the outcome is one that is promised.
  void expect_promised(const StepOutcome& outcome, Fault fault, const StepOutcome& sound) const {
    std::string errors;
    for (const auto& rank : outcome.ranks) errors += "\n  " + rank.error;
    SCOPED_TRACE("by rank:" + errors);
    for (int r = 0; r < kRanks; ++r) {
      const auto& rank = outcome.ranks[static_cast<std::size_t>(r)];
      const bool is_right = rank.hash == sound.ranks[static_cast<std::size_t>(r)].hash;
      const bool is_victim = r == kVictim;
      if (fault == Fault::delay) {
        EXPECT_TRUE(is_right) << "rank " << r << ": " << rank.error;
      } else if (fault == Fault::leave || fault == Fault::silence || fault == Fault::throw_error ||
                 fault == Fault::throw_other) {
        // Ranks that wait for the victim elsewhere may be named beside it, at a deadline.
        EXPECT_TRUE(is_victim || std::ranges::find(rank.named, kVictim) != rank.named.end())
            << "rank " << r << ": " << rank.error;
        EXPECT_TRUE(fault == Fault::silence || rank.named.size() <= 1) << rank.error;
      } else if (is_victim) {
        EXPECT_TRUE(is_right || !rank.error.empty());
      } else {
        EXPECT_TRUE(is_right || rank.error.find("rank") != std::string::npos)
            << "rank " << r << ": " << rank.error;
      }
    }
  }

 private:
  // As run_ranks, it makes a rank's error known to the others.
  RankOutcome run_rank(Communicator& comm, const std::shared_ptr<FaultPlan>& plan) const {
    const auto faulty = testing::make_faulty(comm, plan);
    try {
      return {.hash = testing::train_a_step(*faulty, GetParam(), folder_ / "checkpoint")};
    } catch (const CommunicationError& error) {
      if (!plan->has_left) FailureListeners::abort_for(*faulty, error.what(), error);
      return {.error = error.what(), .named = error.world_ranks()};
    } catch (const std::exception& error) {
      FailureListeners::abort_for(*faulty, error.what(), error);
      return {.error = error.what()};
    } catch (int) {
      faulty->abort("42");
      return {.error = "42"};
    }
  }

  std::filesystem::path folder_;
};

TEST_P(FaultWalkTest, RightBitsOrANamedErrorOnEveryRank) {
  const auto sound = run(Fault::none, 0);
  for (const auto& rank : sound.ranks) ASSERT_TRUE(rank.hash) << rank.error;
  ASSERT_GT(sound.calls.size(), 20U);
  const bool is_whole = std::getenv("SWITCHYARD_FAULTS") != nullptr;
  std::set<std::string> kinds;
  int num_faults = 0;
  for (std::size_t i = 0; i < sound.calls.size(); ++i) {
    const auto operation = sound.calls[i].substr(0, sound.calls[i].find(' '));
    const bool is_first = kinds.insert(operation).second;
    if (!is_whole && !(is_first && is_of_mover(operation))) continue;
    for (const Fault fault : testing::kFaults) {
      SCOPED_TRACE(name_of(fault) + " at call " + std::to_string(i + 1) + ", " + sound.calls[i]);
      expect_promised(run(fault, static_cast<int>(i) + 1), fault, sound);
      const auto again = run(Fault::none, 0);
      for (std::size_t r = 0; r < kRanks; ++r) {
        EXPECT_EQ(again.ranks[r].hash, sound.ranks[r].hash) << again.ranks[r].error;
      }
      ++num_faults;
      if (HasFailure()) return;
    }
  }
  std::printf("%d faults, at %zu calls\n", num_faults, sound.calls.size());
}

INSTANTIATE_TEST_SUITE_P(Movers, FaultWalkTest,
                         ::testing::Values(MoverKind::packed, MoverKind::direct, MoverKind::peer),
                         [](const auto& param) {
                           return param.param == MoverKind::packed   ? "packed"
                                  : param.param == MoverKind::direct ? "direct"
                                                                     : "peer";
                         });

}  // namespace
}  // namespace switchyard::fault_walk_test
