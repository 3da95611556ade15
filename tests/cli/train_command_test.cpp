// SPDX-License-Identifier: Apache-2.0
// The command line of switchyard train, as far as nothing is trained.
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <string>

#include "cli/command.h"
#include "cli/train_runs.h"
#include "support/folder.h"

namespace switchyard::train_command_test {
namespace {

using testing::Folder;
using testing::run;

void expect_error(const std::string& arguments, const std::string& message) {
  const auto outcome = run("train " + arguments);
  EXPECT_EQ(outcome.status, 2) << arguments;
  EXPECT_NE(outcome.output.find("switchyard: " + message), std::string::npos) << outcome.output;
}

TEST(TrainCommand, HelpHasEveryOptionWithItsDefault) {
  const auto help = run("train --help");
  EXPECT_EQ(help.status, 0);
  for (const char* text : {"--ranks N",
                           "0: 4, or with --comm mpi the number that mpirun started [0]",
                           "--comm TEXT:{threads,mpi}",
                           "--timeout SECONDS",
                           "--config TEXT:FILE",
                           "--json",
                           "Model:",
                           "--hidden N",
                           "[128]",
                           "--balance bias|loss|none",
                           "[bias]",
                           "Optimizer:",
                           "--learning-rate X",
                           "[0.003]",
                           "Ranks:",
                           "--expert-axes ep|ep+sp",
                           "Data:",
                           "--corpus PATH",
                           "[embedded]",
                           "Run:",
                           "--steps N",
                           "[400]",
                           "Files:",
                           "--save PATH",
                           "[none]",
                           "--report PATH",
                           "by default in the current folder; none: no report "
                           "[switchyard-report.html]",
                           "writes switchyard-report.html to the current folder",
                           "Sample:",
                           "--prompt TEXT",
                           "--temperature X",
                           "[0.7]"}) {
    EXPECT_NE(help.output.find(text), std::string::npos) << text << "\n" << help.output;
  }
}

TEST(TrainCommand, WrongValuesNameTheFlagAndWhatIsAllowed) {
  expect_error("--hidden 12x", "--hidden \"12x\" is not a whole number from 1 to 65536");
  expect_error("--clip -1", "--clip \"-1\" is not a number from 0 to 1000000000");
  expect_error("--balance even", "--balance \"even\" is not one of bias|loss|none");
  expect_error("--steps ''", "--steps \"\" is not a whole number from 1 to 1000000000");
  expect_error("--comm pigeon", "--comm: pigeon not in {threads,mpi}");
  expect_error("--timeout 0", "--timeout: Value 0 not in range 1 to 1000000");
  expect_error("--timeout 1.5", "--timeout: ");
  expect_error("--step 3",
               "\"--step\" is not an option of switchyard train; the closest is "
               "\"--steps\"\n");
  expect_error("--learning_rate=1",
               "\"--learning_rate\" is not an option of switchyard train; the closest is "
               "\"--learning-rate\"\n");
  expect_error("--corpus ''", "--corpus \"\" is neither a path nor embedded");
  expect_error("--steps", "--steps: 1 required");
}

TEST(TrainCommand, ValuesMustFitEachOtherAndTheRanks) {
  expect_error("--hidden 130", "--hidden 130 must be --heads 4 times an even number");
  expect_error("--dp 3", "--dp 3 × --sp 1 must divide the 4 ranks; --ranks 6 would do");
  expect_error("--ranks 6 --dp 2 --ep 2",
               "--dp 2 × --ep 2 × --sp 1 are 4 ranks, but there are 6; --ep 3 would fit");
}

TEST(TrainCommand, AFileOfOptionsIsRead) {
  const Folder folder;
  const auto path = (folder / "run.json").string();
  const auto with = [&](const std::string& text) {
    std::ofstream(path) << text;
    return "--config " + path;
  };
  expect_error("--config " + path, "--config: File does not exist: " + path);
  expect_error(with(R"({"steps": 0})"),
               path + ": --steps \"0\" is not a whole number from 1 to 1000000000");
  expect_error(with(R"({"step": 5})"),
               path + ": \"step\" is not an option; the closest is \"steps\"");
  expect_error(with(R"({"\u001b[31m": 5})"), path + ": \"?[31m\" is not an option");
  expect_error(with(R"({"steps": 5})") + " --warm-up 6", "--warm-up 6 must be at most --steps 5");
  expect_error(with(R"({"steps": 5, "warm-up": 7})") + " --steps 6",
               "--warm-up 7 must be at most --steps 6");
}

#ifdef SWITCHYARD_MPIRUN
class TrainOutput : public testing::TrainRuns {};

TEST_F(TrainOutput, OutputUnderMpirunIsPlain) {
  const auto outcome =
      train("--comm mpi --steps 2", "TERM=xterm " + std::string(SWITCHYARD_MPIRUN) + " -n 2");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_NE(outcome.output.find("\nstep 1/2  loss "), std::string::npos) << outcome.output;
  EXPECT_EQ(outcome.output.find('\x1b'), std::string::npos) << outcome.output;
}

// A rank that is stopped does not come.
TEST_F(TrainOutput, MpirunsRanksWaitNoLongerThanTheTimeout) {
  const auto file = [&](const std::string& name) { return (folder_ / name).string(); };
  testing::Background command(arguments("--comm mpi --timeout 2 --threads 1 --steps 100000 --json"),
                              std::string(SWITCHYARD_MPIRUN) + " -n 2 sh -c 'echo $$ > " +
                                  file("pid") + "$OMPI_COMM_WORLD_RANK; exec \"$0\" \"$@\" 2> " +
                                  file("said") + "$OMPI_COMM_WORLD_RANK'");
  EXPECT_NE(command.line(), "") << "a step";
  pid_t rank_1 = 0;
  ASSERT_TRUE(std::ifstream(file("pid1")) >> rank_1);
  ::kill(rank_1, SIGSTOP);
  while (!command.line().empty()) {
  }
  EXPECT_NE(command.exit_code(), 0);
  std::string said;
  std::getline(std::ifstream(file("said0")), said, '\0');
  EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
}

TEST(TrainCommand, MpirunWithoutCommIsAnError) {
  const auto outcome = run("train --steps 1", std::string(SWITCHYARD_MPIRUN) + " -n 2");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.output.find("2 processes were started: give --comm mpi for one run over all of "
                                "them, or --comm threads"),
            std::string::npos)
      << outcome.output;
}

TEST(TrainCommand, MpirunDecidesHowManyRanksThereAre) {
  const auto outcome =
      run("train --comm mpi --dp 2 --ep 2", std::string(SWITCHYARD_MPIRUN) + " -n 3");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.output.find("are 4 ranks, but there are 3"), std::string::npos)
      << outcome.output;
}
#endif

}  // namespace
}  // namespace switchyard::train_command_test
