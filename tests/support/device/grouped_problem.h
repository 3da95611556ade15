// SPDX-License-Identifier: Apache-2.0
// Runs grouped products on a GPU, surrounded by NaN.
#pragma once

#include <vector>

#include "support/device/grouped_contents.h"
#include "switchyard/device.h"
#include "switchyard/tensor.h"

namespace switchyard::testing {

// For each group: its rows of c, or the matrices of its parts. run_grouped fails the test if
// anything else was written.
using GroupedResults = std::vector<std::vector<Tensor>>;
GroupedResults run_grouped(const Device& device, const GroupedSetup& setup,
                           const std::vector<GemmGroup>& groups);

}  // namespace switchyard::testing
