// SPDX-License-Identifier: Apache-2.0
// Progress output of a run: a live line on a terminal, plain lines elsewhere, or JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

#include "training/history.h"

namespace switchyard::train {

enum class ConsoleMode {
  live,   // one line, redrawn in place
  plain,  // a line at most every two seconds
  json,   // an object per step
};

// The output streams and the clock, in seconds from any origin.
struct ConsoleOutput {
  std::FILE* out = stdout;
  std::FILE* aside = stderr;           // for people when `out` is for programs
  std::function<double()> clock = {};  // if empty, the real time
  // If this returns true, output that would block is dropped; if empty, output always waits. A
  // launcher that is ending its ranks may have stopped reading from them.
  std::function<bool()> is_in_a_hurry = {};
};

// Exists on rank 0 only.
class Console {
 public:
  Console(ConsoleMode mode, std::int64_t steps, ConsoleOutput output = {});
  // Returns `live` on a terminal that can erase lines, `plain` elsewhere.
  static ConsoleMode mode_of_this_terminal();

  void step(const StepRecord& record);
  void held_out(const HeldOutRecord& record);
  // Prints a separate line of text for people. In JSON mode it goes to stderr.
  void say(const std::string& line);
  // Prints the result as a JSON object. A no-op in other modes, where the run has said it already.
  void result(double held_out_loss, double bigram_loss, const std::string& report);
  // Reports a stopped run in the same way. `folder` is empty if nothing is saved.
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
  double last_shown_ = -1e9;  // clock time in seconds
  double seconds_ = 0.0;      // total time of the steps so far
  std::int64_t counted_ = 0;
  bool line_is_open_ = false;
};

}  // namespace switchyard::train
