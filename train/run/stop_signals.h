// SIGINT and SIGTERM as a wish to stop after the step.
#pragma once

#include <csignal>

namespace switchyard::train {

// While one lives, the first of these signals is only noted; a second one has its usual effect.
// Of several (ranks of one process), the last restores what was before.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool received() const;
};

}  // namespace switchyard::train
