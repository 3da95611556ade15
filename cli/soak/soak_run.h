// Runs a case on its ranks and checks every step of it.
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
  std::int64_t errors = 0;  // that had to come, and came: overflows and bad ids
};

struct SoakOptions {
  DeviceChoice device;
  bool kills = true;
  // A bit of a result of this case is flipped, to prove that somebody notices; −1: of none.
  std::int64_t broken_case = -1;
};

// Throw what is wrong.
void run_on_threads(const SoakCase& c, const SoakOptions& options, SoakFigures& figures);
// Collective: the same error on every rank, and `world` is usable afterwards.
void run_on_processes(Communicator& world, const SoakCase& c, const SoakOptions& options,
                      SoakFigures& figures);

}  // namespace switchyard::cli
