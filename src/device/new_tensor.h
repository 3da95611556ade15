// Memory for what a function returns.
#pragma once

#include "switchyard/device.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Uninitialised, in the device's memory. Of the host's it is fresh, so that what may live for long
// is not counted among the memory that the CPU keeps for reuse.
inline Tensor new_tensor(const Device& device, const Shape& shape, Dtype dtype) {
  return device.memory() == Memory::host ? Tensor(shape, dtype) : device.empty(shape, dtype);
}

}  // namespace switchyard
