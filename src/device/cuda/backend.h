// SPDX-License-Identifier: Apache-2.0
// The GPU backend of a device.
#pragma once

#include "device/cuda/runtime/context.h"
#include "switchyard/device.h"

namespace switchyard::cuda {

// Returns the context of a GPU device. The caller must have that GPU selected (OnGpu).
Context& context_of(const Device& device);

}  // namespace switchyard::cuda
