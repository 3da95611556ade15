// SPDX-License-Identifier: Apache-2.0
// Checks that tensors are in the expected memory (host or GPU).
#pragma once

#include <string_view>

#include "core/require.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Throws unless `view` is in `memory`. Kernels reach only their device's memory, and a raw pointer
// does not reveal which memory it refers to.
inline void require_memory(const ConstTensorView& view, Memory memory, std::string_view name) {
  if (view.memory() == memory) return;
  throw InvalidArgument(fmt::format(
      "{} {} is in {} memory, but the device works in {} memory; copy it with Device::copy_of",
      name, view.shape(), name_of(view.memory()), name_of(memory)));
}

// Returns an error message if `view` is not in `memory`, or an empty string if it is. Meant for
// functions whose device parameter defaults to the CPU.
inline std::string objection_to_memory(const ConstTensorView& view, Memory memory,
                                       std::string_view name) {
  if (view.memory() == memory) return {};
  return fmt::format(
      "{} {} is in {} memory, but the device works in {} memory; {}", name, view.shape(),
      name_of(view.memory()), name_of(memory),
      memory == Memory::host ? "pass the GPU's device as well" : "copy it with Device::copy_of");
}
inline void require_on_device(const ConstTensorView& view, Memory memory, std::string_view name) {
  if (view.memory() != memory) throw InvalidArgument(objection_to_memory(view, memory, name));
}

// Throws unless `view` is in host memory or in `memory`, for functions that accept both.
inline void require_reached(const ConstTensorView& view, Memory memory, std::string_view name) {
  if (view.memory() != Memory::host) require_on_device(view, memory, name);
}

// Throws unless `view` is in host memory, for functions that access elements on the host.
inline void require_host(const ConstTensorView& view, std::string_view name) {
  if (view.memory() == Memory::host) return;
  throw InvalidArgument(fmt::format(
      "{} {} is in GPU memory, but this call needs host memory: copy it with Device::to_host first",
      name, view.shape()));
}

}  // namespace switchyard
