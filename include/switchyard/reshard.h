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

// Collective. Tensors [experts of this rank under `from`, …], of weights or of what an optimizer
// keeps for them, become [experts of this rank under `to`, …]. An expert that changes its owner is
// sent once, straight to the new one; the others are copied. A placement may be for fewer ranks
// than there are: the rest own nothing. At its peak a rank has the old tensors, the new ones, and a
// packed copy of the largest of the old, and one expert's part. Tensors are in the memory of
// `device`, or it is the same InvalidArgument on every rank; what a GPU's send crosses by way of
// the hosts, some 32 MiB at a time.
SWITCHYARD_API std::vector<Tensor> reshard(std::span<const ConstTensorView> shard,
                                           const ExpertPlacement& from, const ExpertPlacement& to,
                                           Communicator& comm, const Device& device = {});

// The same for a layer's weights, or anything that has their form. The router and the shared expert
// are shared with `shard`, not copied. They stay on its device.
SWITCHYARD_API MoeParameters reshard(MoeParameters shard, const ExpertPlacement& from,
                                     const ExpertPlacement& to, Communicator& comm);

}  // namespace switchyard
