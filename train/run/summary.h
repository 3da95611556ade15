// SPDX-License-Identifier: Apache-2.0
// Gathers the contents of a run's report from its ranks.
#pragma once

#include <string>

#include "training/history.h"
#include "training/trainer.h"

namespace switchyard::train {

// "4 ranks (threads): dp 1 x ep 4 x sp 1"
std::string describe(const Mesh& mesh);

// Returns everything except the origin, the state, the held-out and bigram losses, the prompt and
// the sample. `seconds` is the time of the whole run. Collective.
RunSummary summarise(Trainer& trainer, double seconds);

}  // namespace switchyard::train
