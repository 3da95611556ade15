// SPDX-License-Identifier: Apache-2.0
// A stopped run continues from its newest checkpoint as if it had not been stopped.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cli/train_runs.h"
#include "support/random.h"

namespace switchyard::testing::train_stop_test {
namespace {

namespace fs = std::filesystem;

constexpr int kStopped = 3;  // exit code

class TrainStop : public TrainRuns {
 protected:
  std::int64_t newest() const { return newest_in(saved()); }
  static std::int64_t newest_in(const fs::path& saved) {
    std::int64_t step = 0;
    if (!fs::exists(saved)) return step;
    for (const auto& name : Folder::names_in(saved)) {
      if (name.starts_with("step-"))
        step = std::max<std::int64_t>(step, std::stoll(name.substr(5)));
    }
    return step;
  }
  std::string endless(const std::string& more) const {
    return "--ranks 2 --steps 100000 --evaluate-every 0 " + more;
  }
};

void pause(std::int64_t milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

TEST_F(TrainStop, AnInterruptSavesAndTheRunGoesOnBitwise) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    fs::remove_all(saved());
    Losses before;
    {
      Background command(arguments(endless("--every 50000 --json --save " + saved())));
      add_loss(before, nlohmann::json::parse(command.line()));
      command.signal(number);
      for (auto line = command.line(); !line.empty(); line = command.line()) {
        add_loss(before, nlohmann::json::parse(line));
      }
      EXPECT_EQ(command.exit_code(), kStopped);
    }
    const auto last = static_cast<std::int64_t>(before.size());
    EXPECT_EQ(newest(), last);
    const auto straight = losses_up_to(last + 4, endless(""));
    const auto after = losses_up_to(last + 4, "--ranks 2 --resume " + saved());
    expect_same(straight, before, 1, last);
    expect_same(straight, after, last + 1, last + 4);
    EXPECT_EQ(after.size(), 4U);
  }
}

// All that it says, with an interrupt after the first step.
std::string said(Background& command) {
  auto line = command.line();
  while (!line.empty() && !line.starts_with("step ")) line = command.line();
  command.signal(SIGINT);
  std::string text;
  for (line = command.line(); !line.empty(); line = command.line()) text += line + '\n';
  EXPECT_EQ(command.exit_code(), kStopped);
  return text;
}

TEST_F(TrainStop, AnInterruptSaysHowToContinue) {
  Background without(arguments(endless("")));
  const auto text = said(without);
  EXPECT_NE(text.find("stopped after step "), std::string::npos) << text;
  EXPECT_NE(text.find("; nothing was saved, because --save was not given\n"), std::string::npos)
      << text;
  Background with(arguments(endless("--save " + saved())));
  const auto saving = said(with);
  EXPECT_NE(saving.find("stopped and saved after step " + std::to_string(newest()) +
                        "; continue with --resume " + saved() + "\n"),
            std::string::npos)
      << saving;
}

// As timeout sends one: to the command, and to its whole group.
TEST_F(TrainStop, ASignalThatComesTwiceStillSaves) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    fs::remove_all(saved());
    Background command(arguments(endless("--every 50000 --json --save " + saved())));
    command.line();
    command.signal(number);
    pause(1);
    command.signal(number);
    EXPECT_EQ(command.exit_code(), kStopped) << number;
    EXPECT_GT(newest(), 0) << number;
  }
}

TEST_F(TrainStop, RepeatedSigtermsStillSave) {
  Background command(arguments(endless("--every 50000 --json --save " + saved())));
  command.line();
  while (!command.has_ended()) {
    command.signal(SIGTERM);
    pause(1);
  }
  EXPECT_EQ(command.exit_code(), kStopped);
  EXPECT_GT(newest(), 0);
}

TEST_F(TrainStop, ARunThatNobodyListensToGoesOn) {
  Background command(arguments("--ranks 2 --steps 60 --json --save " + saved()));
  command.close_output();
  EXPECT_EQ(command.exit_code(), 1);  // its output is lost
  EXPECT_EQ(newest(), 60);
}

TEST_F(TrainStop, UnreadOutputDoesNotBlockTheRun) {
  Background command(arguments(endless("--every 50000 --json --save " + saved())));
  command.line();
  pause(1000);  // it fills the pipe, and waits
  command.signal(SIGTERM);
  for (int tenths = 0; newest() == 0 && tenths < 100; ++tenths) pause(100);
  EXPECT_GT(newest(), 0);
  EXPECT_EQ(command.exit_code(), kStopped);
}

// While a text is sampled that takes longer than anybody waits.
TEST_F(TrainStop, ASecondInterruptStopsAtOnce) {
  Background command(
      "train --ranks 2 --layers 1 --hidden 32 --heads 2 --context 32 --batch 4 --warm-up 2 "
      "--steps 2 --report none --sample-bytes 1000000 --corpus " +
      (folder_ / "text.txt").string());
  auto line = command.line();
  while (!line.empty() && line.find("held-out loss") == std::string::npos) line = command.line();
  ASSERT_FALSE(line.empty());
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!command.has_ended() && std::chrono::steady_clock::now() < give_up) {
    command.signal(SIGINT);
    pause(20);
  }
  const int status = command.status();
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
}

TEST_F(TrainStop, AKillLosesNothingThatWasSaved) {
  constexpr int kRounds = 5;
  Random random(1);
  Losses seen;
  std::string from;
  for (int round = 0; round < kRounds; ++round) {
    const auto had = newest();
    {
      Background command(arguments(endless("--every 1 --keep 2 --save " + saved() + from) + " > " +
                                   (folder_ / "log").string() + " --json"));
      while (newest() == had && !command.has_ended()) pause(1);
      pause(random.below(100));
      const int status = command.stop(SIGKILL);
      ASSERT_TRUE(WIFSIGNALED(status)) << status;
    }
    std::ifstream log(folder_ / "log");
    Losses of_round;
    for (std::string line; std::getline(log, line) && line.ends_with('}');) {
      add_loss(of_round, nlohmann::json::parse(line));
    }
    // It went on from the newest checkpoint, and lost at most the step that it was at.
    EXPECT_EQ(of_round.begin()->first, had + 1);
    EXPECT_GE(newest(), of_round.rbegin()->first - 1);
    seen.insert(of_round.begin(), of_round.end());
    from = " --resume " + saved();
  }
  const auto last = seen.rbegin()->first;
  expect_same(losses_up_to(last, endless("")), seen, 1, last);
}

#if defined(SWITCHYARD_MPIRUN) && !defined(SWITCHYARD_SANITIZED)  // which is too slow for mpirun
// After one signal mpirun reads nothing more from its ranks, and after some time ends them; by the
// second of two it ends itself; a SIGUSR1 it passes on. More time than usual, for slow machines.
TEST_F(TrainStop, ASignalToMpirunSaves) {
  struct Job {
    int number;
    int times;
    int exit_code;
  };
  const std::array jobs{Job{SIGINT, 1, 1}, Job{SIGTERM, 1, 1}, Job{SIGUSR1, 1, kStopped},
                        Job{SIGINT, 2, 1}, Job{SIGTERM, 2, 1}};
  const auto folder = [&](std::size_t i) { return folder_ / ("job" + std::to_string(i)); };
  std::vector<std::unique_ptr<Background>> commands;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    commands.push_back(std::make_unique<Background>(
        arguments("--comm mpi --threads 1 --steps 100000 --evaluate-every 0 --every 50000 --json "
                  "--save " +
                  folder(i).string()),
        std::string(SWITCHYARD_MPIRUN) +
            " -n 2 --mca odls_base_sigkill_timeout 2 -x PMIX_MCA_pmix_event_caching_window=20"));
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_FALSE(commands[i]->line().empty());
    commands[i]->signal(jobs[i].number);
    if (jobs[i].times == 1) continue;
    pause(10);
    commands[i]->signal(jobs[i].number);
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const auto name =
        std::to_string(jobs[i].times) + " of signal " + std::to_string(jobs[i].number);
    while (!commands[i]->line().empty()) continue;
    EXPECT_EQ(commands[i]->exit_code(), jobs[i].exit_code) << name;
    // Ranks may outlive mpirun.
    for (int tenths = 0; newest_in(folder(i)) == 0 && tenths < 100; ++tenths) pause(100);
    EXPECT_GT(newest_in(folder(i)), 0) << name;
  }
}
#endif

}  // namespace
}  // namespace switchyard::testing::train_stop_test
