// SPDX-License-Identifier: Apache-2.0
// Converts elements from a checkpoint's dtype to another.
#pragma once

#include "switchyard/tensor.h"

namespace switchyard {

// True if the dtypes are equal, for bf16 or f16 to f32, which is exact, and for f16 to bf16, which
// rounds to nearest even.
bool can_become(Dtype from, Dtype into);

// Converts between host views of equal shape. Their dtypes must differ and satisfy can_become.
void convert(const ConstTensorView& from, const TensorView& into);

}  // namespace switchyard
