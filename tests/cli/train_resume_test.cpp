// SPDX-License-Identifier: Apache-2.0
// A run that is resumed is the run that was never stopped.
#include <gtest/gtest.h>

#include <string>

#include "cli/train_runs.h"

namespace switchyard::testing::train_resume_test {
namespace {

double held_out_of(const Outcome& outcome) {
  double loss = 0.0;
  for (const auto& line : lines_of(outcome)) {
    if (line.contains("held_out")) loss = line.at("held_out").at("loss");
  }
  return loss;
}

class TrainResume : public TrainRuns {
 protected:
  // 20 steps that leave a checkpoint after the 10th; then steps 11 to 20 again.
  void expect_bitwise(const std::string& flags) const {
    std::filesystem::remove_all(saved());
    const auto straight = train(flags + " --steps 20 --every 10 --json --save " + saved());
    const auto resumed = train(flags + " --json --resume " + checkpoint(10));
    EXPECT_EQ(straight.status, 0);
    EXPECT_EQ(resumed.status, 0);
    Losses before;
    Losses after;
    for (const auto& line : lines_of(straight)) add_loss(before, line);
    for (const auto& line : lines_of(resumed)) add_loss(after, line);
    EXPECT_EQ(before.size(), 20U);
    EXPECT_EQ(after.size(), 10U);
    expect_same(before, after, 11, 20);
    EXPECT_GT(held_out_of(straight), 0.0);
    EXPECT_EQ(held_out_of(straight), held_out_of(resumed));
  }
};

TEST_F(TrainResume, IsBitwiseAtTheSameMesh) {
  expect_bitwise("--ranks 4");
  expect_bitwise("--ranks 4 --dp 2 --balance loss --tied false");
  expect_bitwise("--ranks 4 --sp 2 --expert-axes ep+sp --shared-intermediate 16");
  expect_bitwise("--ranks 2 --moe-every 2 --sizing bounded --balance none --z-weight 0.001");
}

TEST_F(TrainResume, IsCloseAtOtherMeshes) {
  const auto straight = losses("--ranks 4 --steps 20 --every 10 --save " + saved());
  for (const std::string mesh :
       {"--ranks 1", "--ranks 2", "--ranks 2 --sp 2", "--ranks 4 --dp 2"}) {
    const auto resumed = losses(mesh + " --resume " + checkpoint(10));
    EXPECT_EQ(resumed.size(), 10U);
    expect_near(straight, resumed, 11, 20);
  }
}

TEST_F(TrainResume, AFolderMeansItsNewestCheckpoint) {
  const auto straight = losses("--ranks 2 --steps 9 --every 4 --save " + saved());
  std::filesystem::remove(checkpoint(9));
  const auto resumed = losses("--ranks 2 --resume " + saved() + " --save " + saved());
  EXPECT_EQ(resumed.size(), 1U);
  expect_same(straight, resumed, 9, 9);
  EXPECT_TRUE(std::filesystem::exists(checkpoint(9)));
}

TEST_F(TrainResume, TheNumberOfRanksIsKept) {
  losses("--ep 3 --dp 2 --steps 2 --save " + saved());
  const auto resumed = train("--steps 3 --resume " + saved());
  EXPECT_EQ(resumed.status, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("6 ranks (threads): dp 2 x ep 3 x sp 1"), std::string::npos)
      << resumed.output;
}

TEST_F(TrainResume, ARunThatIsDoneSaysSo) {
  losses("--ranks 2 --steps 5 --save " + saved());
  const auto resumed = train("--resume " + saved());
  EXPECT_NE(
      resumed.output.find(
          "there is nothing left to train: step 5 is done and --steps is 5; give a larger --steps"),
      std::string::npos)
      << resumed.output;
}

TEST_F(TrainResume, ARunThatIsDoneCanBeMadeLonger) {
  losses("--ranks 2 --steps 5 --save " + saved());
  EXPECT_EQ(losses("--ranks 2 --resume " + saved()).size(), 0U);
  EXPECT_EQ(losses("--ranks 2 --steps 8 --resume " + saved()).size(), 3U);
}

TEST_F(TrainResume, ARunThatSavedGoesOnSaving) {
  losses("--ranks 2 --steps 3 --save " + saved());
  const auto moved = (folder_ / "moved there").string();
  std::filesystem::rename(saved(), moved);
  losses("--ranks 2 --steps 4 --resume '" + moved + "' --save none");
  EXPECT_EQ(Folder::names_in(moved), std::set<std::string>{"step-00000003.safetensors"});
  losses("--ranks 2 --steps 5 --resume '" + moved + "'");
  EXPECT_FALSE(std::filesystem::exists(saved()));
  EXPECT_EQ(losses("--ranks 2 --steps 6 --resume '" + moved + "'").size(), 1U);
}

// Or what was left behind would be the newest, and soon all there is.
TEST_F(TrainResume, ARunResumedFromAnEarlierStepIsItsFoldersNewest) {
  losses("--ranks 2 --steps 6 --every 2 --save " + saved());
  losses("--ranks 2 --steps 3 --resume " + checkpoint(2));
  EXPECT_EQ(Folder::names_in(saved()),
            (std::set<std::string>{"step-00000002.safetensors", "step-00000003.safetensors",
                                   "step-00000004.safetensors.set-aside",
                                   "step-00000006.safetensors.set-aside"}));
  EXPECT_EQ(losses("--ranks 2 --steps 5 --resume " + saved()).size(), 2U);
  EXPECT_EQ(
      losses("--ranks 2 --steps 7 --save none --resume " + checkpoint(6) + ".set-aside").size(),
      1U);
}

TEST_F(TrainResume, AnotherTextIsNoted) {
  losses("--ranks 2 --steps 2 --save " + saved());
  EXPECT_EQ(train("--ranks 2 --resume " + saved()).output.find("note: "), std::string::npos);
  const auto text = (folder_ / "text.txt").string();
  std::ofstream(text, std::ios::app) << "and more";
  const auto outcome = train("--ranks 2 --resume " + saved());
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.output.find("note: " + text +
                                " is not the text that this checkpoint was trained on\n"),
            std::string::npos)
      << outcome.output;
}

TEST_F(TrainResume, OnlyTheNewestCheckpointsStay) {
  losses("--ranks 2 --steps 7 --every 2 --keep 2 --save " + saved());
  EXPECT_EQ(Folder::names_in(saved()),
            (std::set<std::string>{"step-00000006.safetensors", "step-00000007.safetensors"}));
}

TEST_F(TrainResume, ANewRunDoesNotSaveOverAnother) {
  losses("--ranks 2 --steps 2 --save " + saved());
  const auto outcome = train("--ranks 2 --steps 2 --save " + saved());
  EXPECT_NE(outcome.status, 0);
  EXPECT_NE(outcome.output.find("holds checkpoints of another run, up to "
                                "step-00000002.safetensors; continue that run with --resume " +
                                saved()),
            std::string::npos)
      << outcome.output;
}

#ifdef SWITCHYARD_MPIRUN
TEST_F(TrainResume, ProcessesGiveTheBitsOfThreads) {
  const std::string flags = "--steps 8 --every 4 ";
  const auto threads = losses(flags + "--ranks 4 --save " + saved());
  const std::string mpirun = std::string(SWITCHYARD_MPIRUN) + " -n 4";
  const auto processes = losses(flags + "--comm mpi --save " + saved() + "2", mpirun);
  EXPECT_EQ(processes.size(), 8U);
  expect_same(threads, processes, 1, 8);
  const auto resumed = losses("--comm mpi --resume " + checkpoint(4), mpirun);
  EXPECT_EQ(resumed.size(), 4U);
  expect_same(threads, resumed, 5, 8);
}
#endif

}  // namespace
}  // namespace switchyard::testing::train_resume_test
