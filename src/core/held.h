// SPDX-License-Identifier: Apache-2.0
// Dereferences an object's implementation pointer. Throws if the object was moved from.
#pragma once

#include <string_view>

#include "core/require.h"

namespace switchyard {

template <typename Pointer>
auto& held(const Pointer& pointer, std::string_view what) {
  require(pointer != nullptr, "this {} was moved from", what);
  return *pointer;
}

}  // namespace switchyard
