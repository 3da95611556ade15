// SPDX-License-Identifier: Apache-2.0
// The commit that this program was built from.
#pragma once

namespace switchyard::cli {

// "d9c981a53b1e", with "-dirty" after it if the sources had changes; empty outside a Git checkout.
// CMake writes its source at every build.
extern const char* const kCommit;

}  // namespace switchyard::cli
