// SPDX-License-Identifier: Apache-2.0
// Memory for the results of functions.
#pragma once

#include "switchyard/device.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Returns an uninitialised tensor in the device's memory. On a CPU it bypasses the device's cache,
// so that results, which may live long, do not count as memory kept for reuse.
inline Tensor new_tensor(const Device& device, const Shape& shape, Dtype dtype) {
  return device.memory() == Memory::host ? Tensor(shape, dtype) : device.empty(shape, dtype);
}

}  // namespace switchyard
