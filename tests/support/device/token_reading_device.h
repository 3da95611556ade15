// SPDX-License-Identifier: Apache-2.0
// A CPU device whose experts read their rows from tokens, as those of a GPU may, so that such
// layers can be tested anywhere.
#pragma once

#include "switchyard/device.h"

namespace switchyard::testing {

// Experts whose weights enter at the input do not read tokens, as on any device. Rows without an
// assignment are NaN.
Device token_reading_device();

}  // namespace switchyard::testing
