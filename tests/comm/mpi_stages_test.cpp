// SPDX-License-Identifier: Apache-2.0
// A rank of a real MPI job dies at a chosen call of MPI, from MPI_Init on: every survivor names it,
// and nothing stays behind.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>

#include "support/mpi_job.h"

namespace switchyard::mpi_failure_test {
namespace {

using namespace std::chrono_literals;
using testing::MpiJob;

constexpr int kVictim = 2;

struct Stage {
  std::string function;
  int call = 1;
};
void PrintTo(const Stage& stage, std::ostream* out) { *out << stage.function << stage.call; }

std::string grief_at(const Stage& stage, int signal) {
  return " -x SWITCHYARD_GRIEF='" + stage.function + " " + std::to_string(stage.call) + " " +
         std::to_string(kVictim) + " " + std::to_string(signal) + "'";
}

std::set<std::string> shared_memory_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const auto name = entry.path().filename().string();
    if (name.starts_with("switchyard")) names.insert(name);
  }
  return names;
}

class MpiStagesTest : public ::testing::TestWithParam<Stage> {
 protected:
  void start(const std::string& mpirun_options, const std::string& arguments) {
    job_.start(SWITCHYARD_MPIRUN + mpirun_options, 4, SWITCHYARD_MPI_STAGES, arguments);
  }
  // Empty if the rank was not killed: the stage has fewer calls.
  std::string survivors_name_the_victim() {
    for (const int rank : {0, 1, 3}) {
      const auto outcome = job_.outcome_of(rank, 30s);
      if (outcome.starts_with("no error")) return {};
      EXPECT_NE(outcome.find("CommunicationError: "), std::string::npos)
          << "rank " << rank << ": " << outcome << job_.log();
      EXPECT_TRUE(outcome.find("rank 2 died") != std::string::npos ||
                  outcome.find("is rank 2 of ") != std::string::npos)
          << outcome;
      EXPECT_NE(outcome.find("\nranks: 2\n"), std::string::npos) << outcome;
    }
    return "killed";
  }

  MpiJob job_;
};

TEST_P(MpiStagesTest, ADeathIsNamedByTheSurvivors) {
  const auto before = shared_memory_files();
  start(grief_at(GetParam(), SIGKILL), "20000");
  EXPECT_EQ(survivors_name_the_victim(), "killed");
  job_.end();
  EXPECT_EQ(shared_memory_files(), before);
}

INSTANTIATE_TEST_SUITE_P(Stages, MpiStagesTest,
                         ::testing::Values(Stage{"MPI_Comm_idup", 2}, Stage{"MPI_Iallgather", 1},
                                           Stage{"MPI_Iallgather", 2}, Stage{"MPI_Comm_split", 1},
                                           Stage{"MPI_Ialltoallv", 2}, Stage{"MPI_Ibcast", 1}),
                         [](const auto& param) {
                           return param.param.function + std::to_string(param.param.call);
                         });

// The other ranks have not looked for the victim yet when it dies there, so it may be unknown.
TEST_F(MpiStagesTest, ADeathInInitEndsTheOthers) {
  start(grief_at({"MPI_Init_thread", 1}, SIGKILL), "4000");
  ASSERT_TRUE(job_.ends_within(30s)) << job_.log();
  const auto log = job_.log();
  for (const int rank : {0, 1, 3}) {
    EXPECT_NE(log.find("rank " + std::to_string(rank) + " of 4 gives up in MPI_Init"),
              std::string::npos)
        << log;
  }
  for (const char* innocent : {"rank 0 died", "rank 1 died", "rank 3 died"}) {
    EXPECT_EQ(log.find(innocent), std::string::npos) << log;
  }
  EXPECT_TRUE(log.find("rank 2 died") != std::string::npos ||
              log.find("rank 2 has not been seen on this host") != std::string::npos)
      << log;
}

TEST_F(MpiStagesTest, ARankThatStopsInInitEndsTheOthersAtTheDeadline) {
  start(grief_at({"MPI_Init_thread", 1}, SIGSTOP), "2000");
  for (const int rank : {0, 1, 3}) {
    const auto words = "rank " + std::to_string(rank) + " of 4 gives up in MPI_Init";
    EXPECT_TRUE(job_.logs_within(30s, words)) << job_.log();
  }
  EXPECT_NE(job_.log().find("2 s have passed"), std::string::npos) << job_.log();
}

TEST_F(MpiStagesTest, ManyGroupsNeedNoMoreDescriptors) {
  start(grief_at({"MPI_Ialltoallv", 1}, SIGKILL), "20000 40");
  EXPECT_EQ(survivors_name_the_victim(), "killed");
}

TEST_F(MpiStagesTest, RanksWithOtherInstructionsAreRefused) {
  job_.start(SWITCHYARD_MPIRUN, 4,
             "sh -c 'test $OMPI_COMM_WORLD_RANK != 2 || export "
             "ONEDNN_MAX_CPU_ISA=SSE41; exec " SWITCHYARD_MPI_STAGES " \"$@\"' --",
             "20000");
  for (const int rank : {0, 1, 2, 3}) {
    const auto outcome = job_.outcome_of(rank, 30s);
    EXPECT_NE(outcome.find("error: connect: rank 0 has Switchyard "), std::string::npos) << outcome;
    EXPECT_NE(outcome.find("but rank 2 has Switchyard "), std::string::npos) << outcome;
    EXPECT_NE(outcome.find("for sse41"), std::string::npos) << outcome;
  }
}

// Every call of every function, which takes minutes: scripts/check.sh faults.
TEST_F(MpiStagesTest, ADeathInAnyCallIsNamedByTheSurvivors) {
  if (std::getenv("SWITCHYARD_FAULTS") == nullptr) {
    GTEST_SKIP() << "SWITCHYARD_FAULTS is not set";
  }
  for (const char* function : {"MPI_Comm_idup", "MPI_Comm_split", "MPI_Iallgather", "MPI_Ialltoall",
                               "MPI_Ialltoallv", "MPI_Ibcast", "MPI_Ibarrier"}) {
    int call = 0;
    do {
      job_.restart();
      start(grief_at({function, ++call}, SIGKILL), "20000");
    } while (!survivors_name_the_victim().empty() && !HasFailure());
    EXPECT_GT(call, 1) << function;
    std::printf("%s: %d calls\n", function, call - 1);
  }
}

}  // namespace
}  // namespace switchyard::mpi_failure_test
