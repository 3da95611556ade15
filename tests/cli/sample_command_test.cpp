// SPDX-License-Identifier: Apache-2.0
// switchyard sample: text from a checkpoint.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "cli/train_runs.h"

namespace switchyard::testing::sample_command_test {
namespace {

class SampleCommand : public TrainRuns {
 protected:
  void SetUp() override {
    TrainRuns::SetUp();
    losses("--ranks 2 --steps 30 --every 10 --save " + saved());
  }
  Outcome sample(const std::string& more) const { return run("sample " + saved() + " " + more); }
  std::string text(const std::string& more) const {
    const auto outcome = sample(more);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    return outcome.output;
  }
};

TEST_F(SampleCommand, PrintsThePromptAndItsContinuation) {
  const auto raw = text("--prompt 'line 7' --bytes 50 --raw");
  EXPECT_EQ(raw.size(), 6U + 50U);
  EXPECT_TRUE(raw.starts_with("line 7"));
  EXPECT_EQ(text("--prompt 'line 7' --bytes 0"), "line 7\n");
  EXPECT_TRUE(text("--bytes 3").starts_with("In the beginning")) << "the prompt of the training";
}

TEST_F(SampleCommand, IsTheSameForEverySeedAndNumberOfRanks) {
  const auto first = text("--prompt line --bytes 40 --seed 3 --temperature 1");
  EXPECT_EQ(text("--prompt line --bytes 40 --seed 3 --temperature 1"), first);
  EXPECT_EQ(text("--prompt line --bytes 40 --seed 3 --temperature 1 --ranks 3"), first);
  EXPECT_NE(text("--prompt line --bytes 40 --seed 4 --temperature 1"), first);
  EXPECT_EQ(text("--prompt line --bytes 9 --seed 3 --temperature 0"),
            text("--prompt line --bytes 9 --seed 4 --temperature 0"));
}

TEST_F(SampleCommand, AFileOrTheNewestOfAFolder) {
  const std::string flags = " --prompt line --bytes 40 --temperature 1";
  EXPECT_EQ(run("sample " + checkpoint(30) + flags).output, text(flags));
  EXPECT_NE(run("sample " + checkpoint(10) + flags).output, text(flags));
}

// Hot enough, any byte is as likely as any other.
TEST_F(SampleCommand, OutputIsEscapedForATerminal) {
  const auto is_shown = [](char c) {
    const auto code = static_cast<unsigned char>(c);
    return c == '\n' || c == '\t' || (0x20U <= code && code < 0x7fU);
  };
  const std::string flags = "--prompt x --bytes 200 --temperature 1000";
  EXPECT_FALSE(std::ranges::all_of(text(flags + " --raw"), is_shown));
  auto shown = text(flags);
  std::erase_if(shown, [](char c) { return static_cast<unsigned char>(c) >= 0x80U; });  // UTF-8
  EXPECT_TRUE(std::ranges::all_of(shown, is_shown));
  EXPECT_NE(shown.find('?'), std::string::npos);
}

#ifdef SWITCHYARD_MPIRUN
TEST_F(SampleCommand, RunsOverProcesses) {
  const std::string flags = "--prompt line --bytes 20 --temperature 1";
  const auto outcome =
      run("sample " + saved() + " --comm mpi " + flags, std::string(SWITCHYARD_MPIRUN) + " -n 2");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.output.find(text(flags)), std::string::npos) << outcome.output;
}
#endif

TEST_F(SampleCommand, BadArgumentsAreRefused) {
  const auto says = [&](const std::string& arguments, int status, const std::string& what) {
    const auto outcome = run("sample " + arguments);
    EXPECT_EQ(outcome.status, status);
    EXPECT_NE(outcome.output.find(what), std::string::npos) << outcome.output;
  };
  says("", 2, "PATH is required");
  says((folder_ / "none").string(), 1, "there is no checkpoint");
  says(saved() + " --temperature -1", 2, "--temperature");
  says(saved() + " --temperature nan", 2, "--temperature: nan is not a number");
  says(saved() + " --seed -1", 2, "--seed");
  says(saved() + " --bytes -1", 2, "--bytes");
  says(saved() + " --ranks 0", 2, "--ranks");
  std::filesystem::resize_file(checkpoint(30), 1000);
  says(saved(), 1, checkpoint(30) + " is damaged: ");
  says(saved(), 1, "; use the one before it, " + checkpoint(20));
}

}  // namespace
}  // namespace switchyard::testing::sample_command_test
