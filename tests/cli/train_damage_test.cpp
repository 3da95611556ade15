// SPDX-License-Identifier: Apache-2.0
// Damaged checkpoints and full disks, as a user meets them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "cli/train_runs.h"

namespace switchyard::testing::train_damage_test {
namespace {

namespace fs = std::filesystem;

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void put(const std::string& path, const std::string& bytes) {
  fs::remove(path);
  std::ofstream(path, std::ios::binary) << bytes;
}

class TrainDamage : public TrainRuns {
 protected:
  void SetUp() override {
    TrainRuns::SetUp();
    straight_ = losses("--ranks 2 --steps 6 --every 2 --save " + saved());
  }

  void expect_refused(const std::string& what) const {
    const auto outcome = train("--ranks 2 --resume " + saved());
    EXPECT_EQ(outcome.status, 1) << what;
    EXPECT_NE(outcome.output.find(checkpoint(6) + " is damaged: "), std::string::npos)
        << what << ": " << outcome.output;
    EXPECT_NE(outcome.output.find("; use the one before it, " + checkpoint(4)), std::string::npos)
        << what << ": " << outcome.output;
  }

  Losses straight_;
};

TEST_F(TrainDamage, ADamagedCheckpointIsNamedAndTheOneBeforeItOffered) {
  const auto whole = bytes_of(checkpoint(6));
  auto flipped = whole;
  flipped[whole.size() / 2] ^= 1;
  put(checkpoint(6), flipped);
  expect_refused("a bit");
  put(checkpoint(6), whole.substr(0, whole.size() - 10));
  expect_refused("cut off");
  put(checkpoint(6), std::string(whole.size(), 'x'));
  expect_refused("garbage");
  put(checkpoint(6), "");
  expect_refused("empty");
  const auto resumed = losses("--ranks 2 --resume " + checkpoint(4) + " --save " + saved());
  EXPECT_EQ(resumed.size(), 2U);
  expect_same(straight_, resumed, 5, 6);
  EXPECT_EQ(train("--ranks 2 --resume " + saved()).status, 0) << "it was replaced by a good one";
}

// A limit on files stands for a disk that is full.
TEST_F(TrainDamage, AFullDiskLeavesTheLastGoodCheckpoint) {
  fs::remove(checkpoint(6));
  const auto outcome =
      train("--ranks 2 --resume " + saved() + " --save " + saved(), "trap '' XFSZ; ulimit -f 8;");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.output.find("for " + checkpoint(6) + ": File too large"), std::string::npos)
      << outcome.output;
  EXPECT_NE(outcome.output.find("; the last good checkpoint is " + checkpoint(4)),
            std::string::npos)
      << outcome.output;
  EXPECT_EQ(Folder::names_in(saved()),
            (std::set<std::string>{"step-00000002.safetensors", "step-00000004.safetensors"}));
  const auto resumed = losses("--ranks 2 --resume " + saved());
  EXPECT_EQ(resumed.size(), 2U);
  expect_same(straight_, resumed, 5, 6);
}

TEST_F(TrainDamage, TwoRunsDoNotSaveToOneFolder) {
  Background first(arguments("--ranks 1 --steps 100000 --every 1 --json --resume " + checkpoint(4) +
                             " --save " + saved()));
  while (nlohmann::json::parse(first.line()).value("step", 0) < 6) {
  }
  const auto second = train("--ranks 1 --resume " + saved() + " --save " + saved());
  EXPECT_EQ(second.status, 1);
  EXPECT_NE(second.output.find("--save " + saved() +
                               ": another run is saving there; end it, or "
                               "choose another folder"),
            std::string::npos)
      << second.output;
  first.signal(SIGTERM);
  EXPECT_EQ(first.exit_code(), 3) << "the first goes on";
}

TEST_F(TrainDamage, LeftoversOfKilledRunsAreRemovedByTheNextRun) {
  put(saved() + "/.step-00000006.safetensors.tmp-17", "a part");
  EXPECT_EQ(train("--ranks 2 --resume " + saved() + " --save " + saved()).status, 0);
  EXPECT_FALSE(fs::exists(saved() + "/.step-00000006.safetensors.tmp-17"));
}

TEST_F(TrainDamage, MissingCheckpointsAreNamed) {
  const auto none = train("--resume " + (folder_ / "none").string());
  EXPECT_NE(none.status, 0);
  EXPECT_NE(none.output.find("there is no checkpoint " + (folder_ / "none").string()),
            std::string::npos)
      << none.output;
  const auto empty = train("--resume " + folder_.path().string());
  EXPECT_NE(empty.status, 0);
  EXPECT_NE(empty.output.find(
                "there is no checkpoint, such as step-00000400.safetensors, in the folder " +
                folder_.path().string()),
            std::string::npos)
      << empty.output;
}

class TrainReport : public TrainRuns {
 protected:
  std::string report() const { return (folder_ / "reports" / "run.html").string(); }
};

TEST_F(TrainReport, AReportThatCannotBeWrittenAtFirstIsAnError) {
  const auto outcome = train("--steps 2 --report " + report());
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.output.find("switchyard: cannot write the report " + report() +
                                ": No such file or directory"),
            std::string::npos)
      << outcome.output;
}

TEST_F(TrainReport, AReportThatCannotBeWrittenLaterIsOneWarning) {
  fs::create_directory(folder_ / "reports");
  Background command(arguments("--ranks 2 --steps 399 --evaluate-every 100 --every 1000 --report " +
                               report() + " --save " + saved()));
  std::string text;
  for (auto line = command.line(); !line.empty(); line = command.line()) {
    text += line + '\n';
    if (line.starts_with("step 1/")) fs::remove_all(folder_ / "reports");
  }
  EXPECT_EQ(command.exit_code(), 0);
  const auto warning = "warning: cannot write the report " + report() +
                       ": No such file or directory; the run continues\n";
  const auto first = text.find(warning);
  EXPECT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("warning", first + 1), std::string::npos) << text;
  EXPECT_EQ(text.find("\nreport: "), std::string::npos) << text;
  EXPECT_TRUE(fs::exists(checkpoint(399))) << text;
}

}  // namespace
}  // namespace switchyard::testing::train_damage_test
