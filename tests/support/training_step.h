// SPDX-License-Identifier: Apache-2.0
// One step with every kind of collective call that a training run makes, for tests in which one of
// them fails.
#pragma once

#include <cstdint>
#include <filesystem>

#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"

namespace switchyard::testing {

// Splits the world into dp = 2 × ep, trains a layer for one step with this mover, saves its weights
// to `checkpoint` and loads them again. Returns a hash of all of this rank's results, which is the
// same in every run. Collective.
std::int64_t train_a_step(Communicator& world, MoverKind mover,
                          const std::filesystem::path& checkpoint);

}  // namespace switchyard::testing
