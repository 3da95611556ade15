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

// For what reads and writes tensors itself, which it cannot in a GPU's memory.
inline void require_host(const ConstTensorView& view, std::string_view name) {
  if (view.memory() == Memory::host) return;
  throw InvalidArgument(
      fmt::format("{} {} is in a GPU's memory, but this works in the host's: copy it with "
                  "Device::to_host first",
                  name, view.shape()));
}

}  // namespace switchyard
