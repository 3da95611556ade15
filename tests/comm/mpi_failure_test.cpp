// SPDX-License-Identifier: Apache-2.0
// Real MPI jobs in which a rank dies, stops, throws or goes its own way: every survivor reports a
// CommunicationError that names it, and no job hangs.
#include <gtest/gtest.h>

#include <chrono>
#include <sstream>
#include <string>

#include "support/mpi_job.h"

namespace switchyard::mpi_failure_test {
namespace {

using namespace std::chrono_literals;
using testing::MpiJob;

class MpiFailureTest : public ::testing::Test {
 protected:
  void start(const std::string& scenario, std::chrono::milliseconds timeout, int num_ranks = 4) {
    job_.start(SWITCHYARD_MPIRUN, num_ranks, SWITCHYARD_RANK_FAILURE,
               scenario + " " + std::to_string(timeout.count()));
  }

  // Survivors name rank 2, in less than so many seconds.
  void expect_survivors_name_the_victim(double within_seconds) const {
    for (const int rank : {0, 1, 3}) {
      const auto outcome = job_.outcome_of(rank, 30s);
      EXPECT_NE(outcome.find("CommunicationError: "), std::string::npos)
          << "rank " << rank << ": " << outcome << job_.log();
      EXPECT_NE(outcome.find("rank 2"), std::string::npos) << outcome;
      EXPECT_NE(outcome.find("\nranks: 2\n"), std::string::npos) << outcome;
      EXPECT_NE(outcome.find(" #"), std::string::npos) << outcome;
      EXPECT_LT(MpiJob::seconds_in(outcome), within_seconds) << outcome;
    }
  }

  MpiJob job_;
};

TEST_F(MpiFailureTest, AKilledRankIsNamedLongBeforeTheDeadline) {
  start("kill", 20s);
  expect_survivors_name_the_victim(5.0);
  EXPECT_NE(job_.outcome_of(0, 1s).find("rank 2 died"), std::string::npos);
}

TEST_F(MpiFailureTest, AStoppedRankIsNamedByTheDeadline) {
  start("stop", 3s);
  expect_survivors_name_the_victim(8.0);
  const auto outcome = job_.outcome_of(0, 1s);
  EXPECT_NE(outcome.find("rank 2 did not arrive within 3 s"), std::string::npos) << outcome;
}

TEST_F(MpiFailureTest, ARankThatThrowsIsNamedWithItsReason) {
  start("throw", 20s);
  expect_survivors_name_the_victim(5.0);
  EXPECT_NE(job_.outcome_of(1, 1s).find("rank 2 gave up: out of coffee"), std::string::npos);
}

TEST_F(MpiFailureTest, ARankThatExitsIsNamed) {
  start("exit", 20s);
  expect_survivors_name_the_victim(5.0);
}

TEST_F(MpiFailureTest, ARankThatComesLateIsNamedAndLearnsOfIt) {
  start("late", 2s);
  expect_survivors_name_the_victim(6.0);
  const auto late = job_.outcome_of(2, 30s);
  EXPECT_NE(late.find("CommunicationError"), std::string::npos) << late;
}

// With two ranks, what the late one waits for is already there: MPI would let it pass.
TEST_F(MpiFailureTest, OneOfTwoThatComesLateLearnsOfIt) {
  start("late", 1s, 2);
  const auto late = job_.outcome_of(1, 30s);
  EXPECT_NE(late.find("CommunicationError"), std::string::npos) << late;
  EXPECT_TRUE(job_.ends_within(10s));
}

TEST_F(MpiFailureTest, AGroupMayOutliveItsWorld) {
  start("subgroup", 20s);
  EXPECT_TRUE(job_.ends_within(10s));
}

TEST_F(MpiFailureTest, AFailureInAGroupDoesNotHangTheEnd) {
  start("subgroup-fails", 20s);
  EXPECT_TRUE(job_.ends_within(10s));
}

TEST_F(MpiFailureTest, ARankThatMakesAnotherCallIsNamed) {
  start("mismatch", 20s);
  expect_survivors_name_the_victim(10.0);
  const auto outcome = job_.outcome_of(0, 1s);
  // Whichever of the two notices first says so.
  EXPECT_TRUE(outcome.find("rank 2 called barrier") != std::string::npos ||
              outcome.find("rank 2 gave up: barrier") != std::string::npos)
      << outcome;
}

TEST_F(MpiFailureTest, RowsThatNobodyExpectsAreNoticed) {
  start("counts", 20s);
  for (const int rank : {0, 1, 2, 3}) {
    const auto outcome = job_.outcome_of(rank, 30s);
    EXPECT_NE(outcome.find("CommunicationError: all_to_all #"), std::string::npos)
        << "rank " << rank << ": " << outcome;
  }
}

TEST_F(MpiFailureTest, SizesThatDifferAreNamedByAll) {
  start("sizes", 20s);
  for (const int rank : {0, 1, 2, 3}) {
    std::istringstream lines(job_.outcome_of(rank, 30s));
    for (const std::string call : {"all_gather #", "broadcast #", "all_to_all #"}) {
      for (const char* size : {"short", "long"}) {
        std::string line;
        std::getline(lines, line);
        const bool is_named = line.find(call) != std::string::npos &&
                              line.find(" bytes, but rank ") != std::string::npos;
        EXPECT_TRUE(is_named && line.find("overwritten") == std::string::npos)
            << "rank " << rank << ", " << call << ", " << size << ": " << line << "\n"
            << job_.log();
      }
    }
  }
}

TEST_F(MpiFailureTest, WithoutAFailureAllEndWell) {
  start("none", 20s);
  for (const int rank : {0, 1, 2, 3}) {
    EXPECT_NE(job_.outcome_of(rank, 30s).find("no error"), std::string::npos);
  }
  EXPECT_TRUE(job_.ends_within(10s));
}

}  // namespace
}  // namespace switchyard::mpi_failure_test
