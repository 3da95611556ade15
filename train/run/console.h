// What a run shows while it goes on: a live line on a terminal, plain lines elsewhere, or JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

#include "training/history.h"

namespace switchyard::train {

enum class ConsoleMode {
  live,   // one line that is replaced
  plain,  // a line now and then, never more often than every two seconds
  json,   // an object a step
};

// Where it is shown, and the time in seconds since whenever.
struct ConsoleOutput {
  std::FILE* out = stdout;
  std::FILE* aside = stderr;           // for people, where `out` is for programs
  std::function<double()> clock = {};  // none: the real one
  // Whether what cannot be shown at once is not to be waited for; none: never. A launcher that
  // ends its ranks may read nothing from them any more.
  std::function<bool()> is_in_a_hurry = {};
};

// Of rank 0; other ranks have none.
class Console {
 public:
  Console(ConsoleMode mode, std::int64_t steps, ConsoleOutput output = {});
  // live on a terminal, plain elsewhere.
  static ConsoleMode mode_of_this_terminal();

  void step(const StepRecord& record);
  void held_out(const HeldOutRecord& record);
  // A line of its own, fit for a terminal; with JSON on the standard error.
  void say(const std::string& line);
  // The end of a run, as an object; for people it has been said.
  void result(double held_out_loss, double bigram_loss, const std::string& report);
  // A run that was stopped, likewise; `folder` is empty if nothing is saved.
  void stopped(std::int64_t step, const std::string& folder);
  // Removes the live line.
  void finish();

 private:
  bool is_due(const StepRecord& record);
  void print(const std::string& line);
  void put(std::FILE* out, const std::string& text) const;
  std::string line_of(const StepRecord& record) const;

  ConsoleMode mode_;
  std::int64_t steps_;
  ConsoleOutput output_;
  double last_shown_ = -1e9;  // seconds on the clock
  double seconds_ = 0.0;      // of the steps so far
  std::int64_t counted_ = 0;
  bool line_is_open_ = false;
};

}  // namespace switchyard::train
