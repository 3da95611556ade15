// SPDX-License-Identifier: Apache-2.0
// The system's message for errno.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace switchyard {

inline std::string last_error() { return std::generic_category().message(errno); }

}  // namespace switchyard
