// Which device a command computes on, and how its tensors come there.
#pragma once

#include "switchyard/device.h"
#include "switchyard/moe_parameters.h"

namespace switchyard::cli {

enum class DeviceKind { cpu, cuda };

// Weights in the device's memory: where they lie, if they are there already.
MoeWeights on_device(const Device& device, const MoeWeights& weights);

}  // namespace switchyard::cli
