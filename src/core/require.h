// SPDX-License-Identifier: Apache-2.0
// Checks with formatted messages: require(ok, "num_experts ({}) must be positive", n).
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <utility>

#include "switchyard/error.h"
#include "switchyard/tensor.h"

// Formats a Shape argument lazily, only when the message is.
template <>
struct fmt::formatter<switchyard::Shape> : fmt::formatter<std::string> {
  template <typename Context>
  auto format(const switchyard::Shape& shape, Context& context) const {
    return fmt::formatter<std::string>::format(shape.to_string(), context);
  }
};

namespace switchyard {

template <typename Exception = InvalidArgument, typename... Args>
void require(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]] {
    throw Exception(fmt::format(message, std::forward<Args>(args)...));
  }
}

// Checks an internal invariant. A failure is a bug in the library.
template <typename... Args>
void check_invariant(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  require<InternalError>(ok, message, std::forward<Args>(args)...);
}

}  // namespace switchyard
