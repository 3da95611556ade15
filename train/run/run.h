// `switchyard train`: a run from beginning, or checkpoint, to its report.
#pragma once

#include "options/config.h"
#include "switchyard/communicator.h"

namespace switchyard::train {

enum class RunEnd {
  completed,
  stopped,  // by a signal, after a step
};

// Collective over `world`. Prints what the user sees, on rank 0. StopSignals end it after the step,
// with a checkpoint if it saves any; it returns when all ranks have done so.
RunEnd run(Communicator& world, const TrainConfig& config);

}  // namespace switchyard::train
