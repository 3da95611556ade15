// For what reads and writes tensors itself, which it cannot where they are in a GPU's memory.
#pragma once

#include <string_view>

#include "core/require.h"
#include "switchyard/tensor.h"

namespace switchyard {

inline void require_host(const ConstTensorView& view, std::string_view name) {
  if (view.memory() == Memory::host) return;
  throw InvalidArgument(
      fmt::format("{} {} is in a GPU's memory, but this works in the host's: copy it with "
                  "Device::to_host first",
                  name, view.shape().to_string()));
}

}  // namespace switchyard
