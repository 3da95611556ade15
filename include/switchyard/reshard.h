// SPDX-License-Identifier: Apache-2.0
// Moves experts between ranks, from one placement to another.
#pragma once

#include <span>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/moe_parameters.h"
#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Converts tensors from one placement of experts to another. Collective. `shard` holds tensors
// [experts of this rank under `from`, …], of weights or of optimizer state; the result holds
// tensors [experts of this rank under `to`, …] in the same order. An expert that changes its owner
// is sent once, directly to the new owner; the others are copied. A placement may be for fewer
// ranks than the communicator has; the remaining ranks own nothing. At its peak, a rank holds the
// old tensors, the new tensors, a packed copy of the largest old one, and one expert's part.
//
// Tensors are in the memory of `device`. Data that moves between GPUs goes through the hosts, about
// 32 MiB at a time, and the call waits for it. Throws the same InvalidArgument on every rank if
// tensors, placements or devices do not match; the communicator stays usable.
SWITCHYARD_API std::vector<Tensor> reshard(std::span<const ConstTensorView> shard,
                                           const ExpertPlacement& from, const ExpertPlacement& to,
                                           Communicator& comm, const Device& device = {});

// Converts a layer's weights, or any parameters of that form, to another placement. Collective, as
// above. The router and the shared expert are shared with `shard`, not copied. The result is on the
// device of `shard`.
SWITCHYARD_API MoeParameters reshard(MoeParameters shard, const ExpertPlacement& from,
                                     const ExpertPlacement& to, Communicator& comm);

}  // namespace switchyard
