// SPDX-License-Identifier: Apache-2.0
// Optional views: a default-constructed view means "not given".
#pragma once

#include "switchyard/tensor.h"

namespace switchyard {

inline bool is_given(const ConstTensorView& view) { return view.data() != nullptr; }

}  // namespace switchyard
