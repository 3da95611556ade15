// SPDX-License-Identifier: Apache-2.0
// Turns signals into a request to stop after the current step.
#pragma once

namespace switchyard::train {

// While an instance exists, SIGINT, SIGTERM, SIGHUP (unless it is ignored, as by nohup) and SIGUSR1
// (which mpirun forwards at once, and schedulers send ahead of time) are only recorded. Another
// SIGINT at least a second later ends the process as usual; an earlier one does not, as a launcher
// may send the same signal twice. SIGPIPE is ignored, so a run continues when nobody reads its
// output. If there are several instances (ranks of one process), the last one restores the previous
// handlers.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool received() const;
};

}  // namespace switchyard::train
