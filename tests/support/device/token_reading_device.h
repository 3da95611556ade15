// A CPU whose experts read their rows from tokens as those of a GPU may: so that layers of such
// experts can be tested anywhere.
#pragma once

#include "switchyard/device.h"

namespace switchyard::testing {

// Experts whose weights enter at the input do not, as on any device. What is no assignment's row
// is NaN.
Device token_reading_device();

}  // namespace switchyard::testing
