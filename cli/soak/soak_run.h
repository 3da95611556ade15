// SPDX-License-Identifier: Apache-2.0
// Runs a case on its ranks and checks every step.
#pragma once

#include <atomic>
#include <cstdint>

#include "device_choice.h"
#include "soak/soak_case.h"
#include "switchyard/communicator.h"

namespace switchyard::cli {

// Counted once for all ranks.
struct SoakFigures {
  std::int64_t cases = 0;
  std::int64_t steps = 0;
  std::int64_t tokens = 0;
  std::int64_t kills = 0;
  std::int64_t errors = 0;  // expected errors that occurred: overflows and bad ids
};

struct SoakOptions {
  DeviceChoice device;
  bool kills = true;
  // Flips a bit in a result of this case, to prove that the checks notice; −1: none.
  std::int64_t broken_case = -1;
};

// Throws an error that says what is wrong.
void run_on_threads(const SoakCase& c, const SoakOptions& options, SoakFigures& figures);
// Collective. Throws the same error on every rank, and leaves `world` usable.
void run_on_processes(Communicator& world, const SoakCase& c, const SoakOptions& options,
                      SoakFigures& figures);

}  // namespace switchyard::cli
