// `switchyard train`: a run from beginning, or checkpoint, to its report.
#pragma once

#include "options/config.h"
#include "switchyard/communicator.h"

namespace switchyard::train {

// Collective over `world`. Prints what the user sees, on rank 0. SIGINT and SIGTERM end it after
// the step, with a checkpoint if it saves any.
void run(Communicator& world, const TrainConfig& config);

}  // namespace switchyard::train
