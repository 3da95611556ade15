// One step that makes every kind of collective call a training run makes, for tests of what happens
// when one of them goes wrong.
#pragma once

#include <cstdint>
#include <filesystem>

#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"

namespace switchyard::testing {

// Collective. Splits the world into dp = 2 × ep, trains a layer for a step over this mover, saves
// its weights to `checkpoint` and loads them again. Returns a hash of all results of this rank,
// which are the same in every run.
std::int64_t train_a_step(Communicator& world, MoverKind mover,
                          const std::filesystem::path& checkpoint);

}  // namespace switchyard::testing
