// A GPU as a device.
#pragma once

#include "device/cuda/runtime/context.h"
#include "switchyard/device.h"

namespace switchyard::cuda {

// What the functions of a GPU work with; who calls them is on that GPU.
Context& context_of(const Device& device);

}  // namespace switchyard::cuda
