// SPDX-License-Identifier: Apache-2.0
// Checks that the functions around a layer give bitwise the same results for device tensors as for
// CPU tensors.
#pragma once

#include <filesystem>

#include "switchyard/communicator.h"
#include "switchyard/device.h"

namespace switchyard::testing {

// All but the last two are collective.
void expect_sequences_as_on_cpu(Communicator& comm, const Device& device);
// Also plans and moves rows on the device.
void expect_combine_sequence_as_on_cpu(Communicator& comm, const Device& device);
void expect_sums_of_gradients_as_on_cpu(Communicator& comm, const Device& device);
void expect_reshard_as_on_cpu(Communicator& comm, const Device& device);
void expect_division_as_on_cpu(Communicator& comm, const Device& device);
// `folder` must be the same on all ranks.
void expect_checkpoints_as_on_cpu(Communicator& comm, const Device& device,
                                  const std::filesystem::path& folder);
void expect_conversions_as_on_cpu(const Device& device);
void expect_balancing_as_on_cpu(const Device& device);

}  // namespace switchyard::testing
