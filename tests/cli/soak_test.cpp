// SPDX-License-Identifier: Apache-2.0
// switchyard soak: random cases, how it ends, and that it notices what is wrong.
#include <gtest/gtest.h>

#include <csignal>
#include <string>

#include "cli/command.h"
#include "cli/train_runs.h"

namespace switchyard::soak_test {
namespace {

using testing::Background;
using testing::Outcome;
using testing::run;

bool says(const Outcome& outcome, const std::string& text) {
  return outcome.output.find(text) != std::string::npos;
}

void expect_refused(const std::string& arguments, const std::string& words) {
  const auto outcome = run("soak " + arguments);
  EXPECT_EQ(outcome.status, 2) << outcome.output;
  EXPECT_TRUE(says(outcome, words)) << outcome.output;
}

TEST(Soak, RandomCasesPass) {
  const auto outcome = run("soak --cases 20 --seed 1");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_TRUE(says(outcome, "20 cases in ")) << outcome.output;
  EXPECT_FALSE(says(outcome, " 0 kills")) << outcome.output;
  EXPECT_FALSE(says(outcome, " 0 expected errors")) << outcome.output;
  EXPECT_TRUE(says(outcome, "descriptors: ")) << outcome.output;
}

TEST(Soak, RanksMayBeChosen) {
  const auto outcome = run("soak --cases 4 --ranks 1");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_TRUE(says(outcome, "1 rank over threads")) << outcome.output;
}

// One case is compared with one rank's bits; the other, which drops rows, with the oracle alone.
TEST(Soak, AWrongBitIsNoticedAndItsCaseCanBeRepeated) {
  struct Broken {
    const char* number;
    const char* words;
  };
  for (const Broken& broken :
       {Broken{"1", "but one rank alone has"}, Broken{"6", "from the oracle's, which has norm"}}) {
    const std::string number = broken.number;
    const std::string breaks = " --break-case " + number;
    const auto found = run("soak --cases 100 --seed 1" + breaks);
    EXPECT_EQ(found.status, 1) << found.output;
    const std::string repeat = "soak --seed 1 --case " + number;
    EXPECT_TRUE(says(found, "case " + number + " of seed 1 failed: step 0")) << found.output;
    EXPECT_TRUE(says(found, broken.words)) << found.output;
    EXPECT_TRUE(says(found, "repeat it with: switchyard " + repeat + "\n")) << found.output;
    EXPECT_EQ(run(repeat + breaks).status, 1);
    EXPECT_EQ(run(repeat).status, 0);
  }
}

TEST(Soak, ASignalEndsTheRunWithItsTotals) {
  for (const int number : {SIGINT, SIGTERM}) {
    Background command("soak --minutes 60");
    EXPECT_EQ(command.line(), "seed 1, random ranks over threads");
    command.signal(number);
    EXPECT_NE(command.line().find(" cases in "), std::string::npos);
    while (!command.line().empty()) continue;
    EXPECT_EQ(command.exit_code(), 0);
  }
}

TEST(Soak, BadArgumentsAreRefused) {
  expect_refused("--minutes -1", "--minutes");
  expect_refused("--minutes 1 --cases 2", "excludes");
  expect_refused("--case 1 --cases 2", "excludes");
  expect_refused("--ranks 9", "--ranks");
  expect_refused("--ranks many", "--ranks");
  expect_refused("--comm pigeons", "--comm");
  expect_refused("--comm mpi --ranks 2", "set the number by mpirun -n");
  expect_refused("--kernels portable", "add --device cuda");
}

TEST(Soak, HelpSaysHowAFailureIsRepeated) {
  const auto outcome = run("soak --help");
  EXPECT_EQ(outcome.status, 0);
  for (const char* words : {"--minutes N", "--seed S", "--ranks N|random", "repeats it"}) {
    EXPECT_TRUE(says(outcome, words)) << words << "\n" << outcome.output;
  }
  EXPECT_FALSE(says(outcome, "--break-case")) << outcome.output;
}

#ifdef SWITCHYARD_MPIRUN
TEST(SoakUnderMpirun, RandomCasesPass) {
  const std::string mpirun = std::string(SWITCHYARD_MPIRUN) + " -n 3";
  const auto without = run("soak --cases 5 --comm mpi", mpirun);
  EXPECT_EQ(without.status, 0) << without.output;
  EXPECT_TRUE(says(without, "kills need mpirun --mca")) << without.output;
  const auto with =
      run("soak --cases 20 --comm mpi", mpirun + " --mca orte_allowed_exit_without_sync 1");
  EXPECT_EQ(with.status, 0) << with.output;
  EXPECT_TRUE(says(with, "20 cases in ")) << with.output;
  EXPECT_FALSE(says(with, " 0 kills")) << with.output;
}

TEST(SoakUnderMpirun, AWrongBitIsNoticed) {
  const auto outcome =
      run("soak --cases 9 --comm mpi --break-case 1", std::string(SWITCHYARD_MPIRUN) + " -n 3");
  EXPECT_EQ(outcome.status, 1) << outcome.output;
  EXPECT_TRUE(says(outcome,
                   "repeat it with: mpirun -n 3 switchyard soak --seed 1 --case 1 --comm "
                   "mpi"))
      << outcome.output;
}
#endif

}  // namespace
}  // namespace switchyard::soak_test
