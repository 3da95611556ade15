// SPDX-License-Identifier: Apache-2.0
#include "run/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace switchyard::train::console_test {
namespace {

using Lines = std::vector<std::string>;

// A console whose output and time are the test's.
class Shown {
 public:
  Shown(ConsoleMode mode, std::int64_t steps)
      : out_(::open_memstream(&out_text_, &out_size_)),
        aside_(::open_memstream(&aside_text_, &aside_size_)),
        console(mode, steps, {.out = out_, .aside = aside_, .clock = [this] { return now; }}) {}
  ~Shown() {
    std::fclose(out_);
    std::fclose(aside_);
    std::free(out_text_);
    std::free(aside_text_);
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

  std::string text() const { return {out_text_, out_size_}; }
  std::string aside() {
    std::fflush(aside_);
    return {aside_text_, aside_size_};
  }
  Lines lines() const {
    Lines result;
    std::istringstream stream(text());
    for (std::string line; std::getline(stream, line);) result.push_back(line);
    return result;
  }

 private:
  char* out_text_ = nullptr;
  char* aside_text_ = nullptr;
  std::size_t out_size_ = 0;
  std::size_t aside_size_ = 0;
  std::FILE* out_;
  std::FILE* aside_;

 public:
  double now = 0.0;
  Console console;
};

StepRecord record_of(std::int64_t step) {
  return {
      .step = step, .loss = 2.0125, .seconds = 0.5, .tokens_per_second = 41230.0, .balance = 1.234};
}

TEST(Console, PlainLinesComeEveryTwoSeconds) {
  Shown shown(ConsoleMode::plain, 8);
  for (std::int64_t step = 1; step <= 8; ++step) {
    shown.console.step(record_of(step));
    shown.now += 0.75;
  }
  shown.console.finish();
  const std::string rest = "  loss 2.01  41.2k tokens/s  balance 1.23  ETA 0:0";
  EXPECT_EQ(shown.lines(), (Lines{"step 1/8" + rest + "4", "step 4/8" + rest + "2",
                                  "step 7/8" + rest + "1", "step 8/8" + rest + "0"}));
}

TEST(Console, NumbersFitAnySize) {
  const auto line = [](double rate, double seconds) {
    Shown shown(ConsoleMode::plain, 1001);
    StepRecord record = record_of(1);
    record.tokens_per_second = rate;
    record.seconds = seconds;
    shown.console.step(record);
    return shown.text();
  };
  const std::string begin = "step 1/1001  loss 2.01  ";
  EXPECT_EQ(line(949.6, 0.0721), begin + "950 tokens/s  balance 1.23  ETA 1:12\n");
  EXPECT_EQ(line(3.07e6, 7.384), begin + "3.07M tokens/s  balance 1.23  ETA 2:03:04\n");
}

TEST(Console, ARunThatWasResumedCountsItsOwnSteps) {
  Shown shown(ConsoleMode::plain, 400);
  shown.console.step(record_of(301));
  EXPECT_NE(shown.text().find("ETA 0:50\n"), std::string::npos) << shown.text();
}

TEST(Console, TheLiveLineIsReplaced) {
  Shown shown(ConsoleMode::live, 9);
  for (std::int64_t step = 1; step <= 4; ++step) {
    shown.console.step(record_of(step));
    shown.now += 0.06;
  }
  const std::string rest = "/9  loss 2.01  41.2k tokens/s  balance 1.23  ETA 0:0";
  const std::string line = "\r\x1b[Kstep 1" + rest + "4\r\x1b[Kstep 3" + rest + "3";
  EXPECT_EQ(shown.text(), line);
  shown.console.held_out({.step = 4, .loss = 1.98765});
  const std::string told = line + "\r\x1b[Kstep 4/9  held-out loss 1.99\n";
  EXPECT_EQ(shown.text(), told);
  shown.console.say("done");
  shown.console.finish();
  EXPECT_EQ(shown.text(), told + "done\n");
}

TEST(Console, TheLiveLineIsCutToTheTerminal) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(::grantpt(terminal), 0);
  ASSERT_EQ(::unlockpt(terminal), 0);
  std::FILE* const out = std::fopen(::ptsname(terminal), "w");
  ASSERT_NE(out, nullptr);
  const winsize size{.ws_row = 24, .ws_col = 20, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(::ioctl(terminal, TIOCSWINSZ, &size), 0);
  Console console(ConsoleMode::live, 9, {.out = out});
  console.step(record_of(1));
  std::array<char, 256> text{};
  const auto count = ::read(terminal, text.data(), text.size());
  EXPECT_EQ(std::string(text.data(), count < 0 ? 0 : static_cast<std::size_t>(count)),
            "\r\x1b[Kstep 1/9  loss 2.01");
  std::fclose(out);
  ::close(terminal);
}

TEST(Console, JsonHasEveryStepAndAllOfIt) {
  Shown shown(ConsoleMode::json, 3);
  const double loss = 1.0 / 3.0 + 1e-16;
  StepRecord record{.step = 1,
                    .loss = loss,
                    .balance_loss = 0.1,
                    .z_loss = 0.2,
                    .learning_rate = 0.003F,
                    .gradient_norm = 0.4,
                    .seconds = 0.5,
                    .tokens_per_second = 600.0,
                    .balance = 1.7,
                    .gemm_share = 0.8,
                    .moe_seconds = 0.9,
                    .moe_gflops = 10.0,
                    .bytes_moved = 1LL << 40,
                    .ran_again = true};
  shown.console.step(record);
  record.step = 2;
  shown.console.step(record);
  shown.console.held_out({.step = 2, .loss = loss});
  shown.console.say("for people");
  shown.console.finish();
  const auto lines = shown.lines();
  ASSERT_EQ(lines.size(), 3U) << shown.text();
  EXPECT_EQ(nlohmann::json::parse(lines[0]), (nlohmann::json{{"step", 1},
                                                             {"loss", loss},
                                                             {"balance_loss", 0.1},
                                                             {"z_loss", 0.2},
                                                             {"learning_rate", 0.003F},
                                                             {"gradient_norm", 0.4},
                                                             {"seconds", 0.5},
                                                             {"tokens_per_second", 600.0},
                                                             {"balance", 1.7},
                                                             {"gemm_share", 0.8},
                                                             {"moe_seconds", 0.9},
                                                             {"moe_gflops", 10.0},
                                                             {"bytes_moved", 1LL << 40},
                                                             {"ran_again", true}}));
  EXPECT_EQ(nlohmann::json::parse(lines[1]).at("step"), 2);
  EXPECT_EQ(nlohmann::json::parse(lines[2]),
            (nlohmann::json{{"held_out", {{"step", 2}, {"loss", loss}}}}));
  EXPECT_EQ(shown.aside(), "for people\n");
}

// A model says what it likes, and a file has any name.
TEST(Console, JsonTellsTheEnd) {
  Shown shown(ConsoleMode::json, 3);
  shown.console.result(1.5, 2.5, "a\xff.html");
  shown.console.stopped(7, "folder");
  const auto lines = shown.lines();
  ASSERT_EQ(lines.size(), 2U) << shown.text();
  const auto result = nlohmann::json::parse(lines[0]).at("result");
  EXPECT_EQ(result.at("held_out_loss"), 1.5);
  EXPECT_EQ(result.at("bigram_loss"), 2.5);
  EXPECT_EQ(result.at("report"), "a\uFFFD.html");
  EXPECT_EQ(nlohmann::json::parse(lines[1]),
            (nlohmann::json{{"stopped", {{"step", 7}, {"checkpoints", "folder"}}}}));
  Shown plain(ConsoleMode::plain, 3);
  plain.console.result(1.5, 2.5, "a");
  plain.console.stopped(7, "folder");
  EXPECT_TRUE(plain.lines().empty());
}

TEST(Console, MessagesDoNotControlTheTerminal) {
  const std::string text = "a\x1b[2Jb\xff\tc\nd\xc2\x9b";
  for (const auto mode : {ConsoleMode::live, ConsoleMode::plain}) {
    Shown shown(mode, 10);
    shown.console.say(text);
    EXPECT_EQ(shown.text(), "a?[2Jb?\tc\nd?\n");
  }
  Shown shown(ConsoleMode::json, 10);
  shown.console.say(text);
  EXPECT_EQ(shown.aside(), "a?[2Jb?\tc\nd?\n");
}

TEST(Console, OutsideOfATerminalLinesArePlain) {
  ::testing::internal::CaptureStdout();  // a file
  EXPECT_EQ(Console::mode_of_this_terminal(), ConsoleMode::plain);
  ::testing::internal::GetCapturedStdout();
}

}  // namespace
}  // namespace switchyard::train::console_test
