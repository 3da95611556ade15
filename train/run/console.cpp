// SPDX-License-Identifier: Apache-2.0
#include "run/console.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "common/printable.h"

namespace switchyard::train {
namespace {

constexpr double kLiveSeconds = 0.1;
constexpr double kPlainSeconds = 2.0;
constexpr std::string_view kRemoveLine = "\r\x1b[K";

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the terminal's width in columns, or 80 if it is unknown.
std::size_t width_of(std::FILE* out) {
  winsize size{};
  const bool is_known = ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_known ? size.ws_col : 80;
}

// Waits briefly until `out` can take more. A pipe then takes a whole line.
bool takes_more(std::FILE* out) {
  constexpr int kMilliseconds = 50;
  pollfd watch{::fileno(out), POLLOUT, 0};
  return watch.fd < 0 || ::poll(&watch, 1, kMilliseconds) > 0;
}

// 950, 41.2k, 3.07M.
std::string rate_text(double rate) {
  if (rate < 1e3) return fmt::format("{:.0f}", rate);
  if (rate < 1e6) return fmt::format("{:.1f}k", rate / 1e3);
  return fmt::format("{:.2f}M", rate / 1e6);
}

// 1:12, 2:03:04.
std::string time_text(double seconds) {
  const auto s = std::llround(seconds);
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

nlohmann::ordered_json json_of(const StepRecord& r) {
  return {{"step", r.step},
          {"loss", r.loss},
          {"balance_loss", r.balance_loss},
          {"z_loss", r.z_loss},
          {"learning_rate", r.learning_rate},
          {"gradient_norm", r.gradient_norm},
          {"seconds", r.seconds},
          {"tokens_per_second", r.tokens_per_second},
          {"balance", r.balance},
          {"gemm_share", r.gemm_share},
          {"moe_seconds", r.moe_seconds},
          {"moe_gflops", r.moe_gflops},
          {"bytes_moved", r.bytes_moved},
          {"ran_again", r.ran_again > 0}};
}

// Formats {"name": values}. Replaces invalid UTF-8, which paths may contain.
std::string object_line(const char* name, const nlohmann::ordered_json& values) {
  return nlohmann::ordered_json{{name, values}}.dump(
      -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

Console::Console(ConsoleMode mode, std::int64_t steps, ConsoleOutput output)
    : mode_(mode), steps_(steps), output_(std::move(output)) {
  if (!output_.clock) output_.clock = seconds_now;
}

ConsoleMode Console::mode_of_this_terminal() {
  const char* const kind = std::getenv("TERM");
  const bool can_remove_lines = kind != nullptr && std::string_view(kind) != "dumb";
  return can_remove_lines && ::isatty(STDOUT_FILENO) != 0 ? ConsoleMode::live : ConsoleMode::plain;
}

void Console::step(const StepRecord& record) {
  seconds_ += record.seconds;
  ++counted_;
  if (mode_ == ConsoleMode::json) {
    print(json_of(record).dump());
  } else if (is_due(record)) {
    const auto line = line_of(record);
    if (mode_ == ConsoleMode::plain) {
      print(line);
    } else {
      put(output_.out, fmt::format("{}{}", kRemoveLine, line.substr(0, width_of(output_.out) - 1)));
      line_is_open_ = true;
    }
  }
}

void Console::held_out(const HeldOutRecord& record) {
  if (mode_ == ConsoleMode::json) {
    print(object_line("held_out", {{"step", record.step}, {"loss", record.loss}}));
  } else {
    say(fmt::format("step {}/{}  held-out loss {:.2f}", record.step, steps_, record.loss));
  }
}

void Console::result(double held_out_loss, double bigram_loss, const std::string& report) {
  if (mode_ != ConsoleMode::json) return;
  print(object_line(
      "result",
      {{"held_out_loss", held_out_loss}, {"bigram_loss", bigram_loss}, {"report", report}}));
}

void Console::stopped(std::int64_t step, const std::string& folder) {
  if (mode_ != ConsoleMode::json) return;
  print(object_line("stopped", {{"step", step}, {"checkpoints", folder}}));
}

void Console::say(const std::string& line) {
  finish();
  const auto text = printable_lines(line);
  if (mode_ != ConsoleMode::json) return print(text);
  put(output_.aside, text + '\n');
}

void Console::finish() {
  if (!line_is_open_) return;
  put(output_.out, std::string(kRemoveLine));
  line_is_open_ = false;
}

// Always true for the first and the last step.
bool Console::is_due(const StepRecord& record) {
  const double now = output_.clock();
  const double pause = mode_ == ConsoleMode::live ? kLiveSeconds : kPlainSeconds;
  if (counted_ > 1 && record.step < steps_ && now - last_shown_ < pause) return false;
  last_shown_ = now;
  return true;
}

void Console::print(const std::string& line) { put(output_.out, line + '\n'); }

// Ignores write errors: the run continues even if its output is lost.
void Console::put(std::FILE* out, const std::string& text) const {
  while (!takes_more(out)) {
    if (output_.is_in_a_hurry && output_.is_in_a_hurry()) return;
  }
  std::fwrite(text.data(), 1, text.size(), out);
  std::fflush(out);
}

// The ETA uses only the steps of this run, since a resumed run did not time the earlier ones.
std::string Console::line_of(const StepRecord& record) const {
  const auto left = static_cast<double>(steps_ - record.step);
  return fmt::format("step {}/{}  loss {:.2f}  {} tokens/s  balance {:.2f}  ETA {}", record.step,
                     steps_, record.loss, rate_text(record.tokens_per_second), record.balance,
                     time_text(left * seconds_ / static_cast<double>(counted_)));
}

}  // namespace switchyard::train
