// SPDX-License-Identifier: Apache-2.0
// Runs of switchyard train that take a second or two, on a text of the test's own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.h"
#include "support/folder.h"

namespace switchyard::testing {

using Losses = std::map<std::int64_t, double>;  // by step

// A command in the background, whose standard output is read line by line.
class Background {
 public:
  // Its standard error is not shown.
  explicit Background(const std::string& arguments, const std::string& launcher = "") {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    ::fcntl(ends[1], F_SETPIPE_SZ, 4096);  // soon full where nobody reads
    const auto command =
        "exec " + launcher + " " + SWITCHYARD_COMMAND + " " + arguments + " 2>/dev/null";
    pid_ = ::fork();
    if (pid_ == 0) {
      ::signal(SIGINT, SIG_DFL);  // ignored when the tests themselves run in the background
      ::dup2(ends[1], STDOUT_FILENO);
      ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    output_ = ::fdopen(ends[0], "r");
  }
  ~Background() {
    if (pid_ > 0) stop(SIGKILL);
    close_output();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Empty at the end.
  std::string line() {
    std::string text;
    for (int c = 0; (c = std::fgetc(output_)) != EOF && c != '\n';) text += static_cast<char>(c);
    return text;
  }
  // Closes the reading end of the pipe.
  void close_output() {
    if (output_ != nullptr) std::fclose(output_);
    output_ = nullptr;
  }
  void signal(int number) const { ::kill(pid_, number); }
  bool has_ended() {
    if (pid_ > 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
    return pid_ < 0;
  }
  // How it ended: as of waitpid.
  int status() {
    if (pid_ > 0) ::waitpid(pid_, &status_, 0);
    pid_ = -1;
    return status_;
  }
  // -1: by a signal.
  int exit_code() {
    const int how = status();
    return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
  }
  int stop(int number) {
    signal(number);
    return status();
  }

 private:
  pid_t pid_ = -1;
  int status_ = -1;
  std::FILE* output_ = nullptr;
};

inline void add_loss(Losses& losses, const nlohmann::json& line) {
  if (line.contains("step")) losses[line.at("step")] = line.at("loss");
}

class TrainRuns : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream text(folder_ / "text.txt");
    for (int i = 0; i < 3000; ++i) text << "line " << i * i % 977 << " of it\n";
  }

  // Trains a small model, with a report nowhere unless one is asked for.
  std::string arguments(const std::string& more) const {
    const bool asks = more.find("--report ") != std::string::npos;
    return "train --layers 2 --hidden 32 --heads 2 --context 32 --experts 4 --intermediate 32 "
           "--batch 4 --warm-up 2 --held-out 8 --sample-bytes 0 --corpus " +
           (folder_ / "text.txt").string() + (asks ? " " : " --report none ") + more;
  }
  Outcome train(const std::string& more, const std::string& launcher = "") const {
    return run(arguments(more), launcher);
  }
  // Returns the losses of all steps of a run, which must succeed.
  Losses losses(const std::string& more, const std::string& launcher = "") const {
    const auto outcome = train(more + " --json", launcher);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    Losses all;
    for (const auto& line : lines_of(outcome)) add_loss(all, line);
    return all;
  }
  // Returns the losses of the steps up to `last`, then stops the run.
  Losses losses_up_to(std::int64_t last, const std::string& more) const {
    Background command(arguments(more + " --json"));
    Losses all;
    for (auto line = command.line(); !line.empty(); line = command.line()) {
      add_loss(all, nlohmann::json::parse(line));
      if (all.contains(last)) break;
    }
    return all;
  }

  std::string checkpoint(int step) const {
    auto digits = std::to_string(step);
    digits.insert(0, 8 - digits.size(), '0');
    return (folder_ / "saved" / ("step-" + digits + ".safetensors")).string();
  }
  std::string saved() const { return (folder_ / "saved").string(); }

  const Folder folder_;
};

// Steps first … last of both, bit for bit.
inline void expect_same(const Losses& a, const Losses& b, std::int64_t first, std::int64_t last) {
  for (auto step = first; step <= last; ++step) {
    ASSERT_TRUE(a.contains(step) && b.contains(step)) << "step " << step;
    EXPECT_EQ(a.at(step), b.at(step)) << "step " << step;
  }
}

inline void expect_near(const Losses& a, const Losses& b, std::int64_t first, std::int64_t last) {
  for (auto step = first; step <= last; ++step) {
    ASSERT_TRUE(a.contains(step) && b.contains(step)) << "step " << step;
    EXPECT_NEAR(a.at(step) / b.at(step), 1.0, 1e-4) << "step " << step;
  }
}

}  // namespace switchyard::testing
