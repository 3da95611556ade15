// Checks of where tensors are.
#pragma once

#include <string_view>

#include "core/require.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Kernels cannot look elsewhere, and nobody can see in a pointer where it leads.
inline void require_memory(const ConstTensorView& view, Memory memory, std::string_view name) {
  if (view.memory() == memory) return;
  throw InvalidArgument(fmt::format(
      "{} {} is in {} memory, but the device works in {} memory; Device::copy_of brings it there",
      name, view.shape(), name_of(view.memory()), name_of(memory)));
}

// For functions that take a device with their tensors, the CPU where none is given.
// Empty: the tensor is where it must be.
inline std::string objection_to_memory(const ConstTensorView& view, Memory memory,
                                       std::string_view name) {
  if (view.memory() == memory) return {};
  return fmt::format("{} {} is in {} memory, but the device works in {} memory; {}", name,
                     view.shape(), name_of(view.memory()), name_of(memory),
                     memory == Memory::host ? "give the GPU's device along with it"
                                            : "Device::copy_of brings it there");
}
inline void require_on_device(const ConstTensorView& view, Memory memory, std::string_view name) {
  if (view.memory() != memory) throw InvalidArgument(objection_to_memory(view, memory, name));
}

// For what takes tensors of the host's memory along with those of the device's.
inline void require_reached(const ConstTensorView& view, Memory memory, std::string_view name) {
  if (view.memory() != Memory::host) require_on_device(view, memory, name);
}

// For what reads and writes tensors itself, which it cannot in a GPU's memory.
inline void require_host(const ConstTensorView& view, std::string_view name) {
  if (view.memory() == Memory::host) return;
  throw InvalidArgument(
      fmt::format("{} {} is in a GPU's memory, but this works in the host's: copy it with "
                  "Device::to_host first",
                  name, view.shape()));
}

}  // namespace switchyard
