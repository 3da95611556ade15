// SPDX-License-Identifier: Apache-2.0
// Runs a recorded case on ranks and measures how far the results are from the recorded ones.
#pragma once

#include <string>
#include <vector>

#include "device_choice.h"
#include "switchyard/communicator.h"
#include "verify/difference.h"
#include "verify/golden_case.h"

namespace switchyard::cli {

struct GoldenRun {
  std::vector<Comparison> comparisons = {};
  std::string error = {};  // the message, if the layer threw

  bool ok() const;
};

// Collective. Returns the same result on every rank. An error in the layer leaves `comm` usable.
GoldenRun run_golden_case(Communicator& comm, const GoldenCase& golden, const Division& division,
                          const DeviceChoice& device);

}  // namespace switchyard::cli
