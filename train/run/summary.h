// What a run's report says, gathered from its ranks.
#pragma once

#include <cstdint>
#include <string>

#include "training/history.h"
#include "training/trainer.h"

namespace switchyard::train {

// "4 ranks (threads): dp 1 x ep 4 x sp 1"
std::string describe(const Mesh& mesh);

// Collective. All but held-out and bigram losses, prompt and sample. `seconds` are
// those of the whole run.
RunSummary summarise(Trainer& trainer, double seconds);

}  // namespace switchyard::train
