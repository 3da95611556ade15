// SPDX-License-Identifier: Apache-2.0
// Exchanges integers that ranks act on: addresses, sizes, hashes.
#pragma once

#include <cstdint>
#include <span>

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Collective. Returns every rank's numbers as [ranks, n], i64; n must be the same on all ranks. The
// numbers travel with a checksum. On a mismatch this rank aborts the communicator and throws a
// CommunicationError that names the sender.
Tensor gather_numbers(Communicator& comm, std::span<const std::int64_t> own);

}  // namespace switchyard
