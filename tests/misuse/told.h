// SPDX-License-Identifier: Apache-2.0
// Errors of the C interface as exceptions.
#pragma once

#include <cstdint>

#include "switchyard/c/switchyard.h"
#include "switchyard/error.h"

namespace switchyard::misuse {

inline void told(int result) {
  if (result != switchyard_ok) throw Error(switchyard_last_error());
}
inline void told_number(std::int64_t number) {
  if (number < 0) throw Error(switchyard_last_error());
}

}  // namespace switchyard::misuse
