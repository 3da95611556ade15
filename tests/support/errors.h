// SPDX-License-Identifier: Apache-2.0
// Catches an error of a given type and returns its message.
#pragma once

#include <string>

namespace switchyard::testing {

// Returns "no error" if nothing was thrown. Other exception types pass through.
template <typename Error, typename Fn>
std::string error_of(Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace switchyard::testing
