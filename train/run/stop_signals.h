// Signals as a wish to stop after the step.
#pragma once

namespace switchyard::train {

// While one lives, SIGINT, SIGTERM, SIGHUP (unless it is ignored, as by nohup) and SIGUSR1 (which
// mpirun passes on at once, and schedulers send ahead of time) are only noted. Another SIGINT a
// second later, or more, ends the process as ever: a launcher that sends one signal twice has not
// asked for that. SIGPIPE is ignored: a run goes on where nobody listens. Where several live (ranks
// of one process), the last restores what was before.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool received() const;
};

}  // namespace switchyard::train
