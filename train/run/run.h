// SPDX-License-Identifier: Apache-2.0
// `switchyard train`: a run from its start or a checkpoint to its report.
#pragma once

#include <string>

#include "options/config.h"
#include "switchyard/communicator.h"

namespace switchyard::train {

enum class RunEnd {
  completed,
  stopped,  // by a signal, at the end of a step
};

// The program that trains, as the report names it.
struct Program {
  std::string command_line;
  std::string commit;  // of its sources; empty: unknown
};

// Runs training; rank 0 prints the output. A signal (StopSignals) ends the run after the current
// step, with a checkpoint if the run saves any. Returns once all ranks have finished. Collective
// over `world`.
RunEnd run(Communicator& world, const TrainConfig& config, const Program& program = {});

}  // namespace switchyard::train
