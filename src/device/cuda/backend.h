// A GPU as a device.
#pragma once

#include "device/cuda/runtime/context.h"
#include "switchyard/device.h"

namespace switchyard::cuda {

// What the functions of a GPU work with, which is then the one that the calling thread uses.
Context& context_of(const Device& device);

}  // namespace switchyard::cuda
