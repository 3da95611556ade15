// Elements of a checkpoint's dtype as those of another.
#pragma once

#include "switchyard/tensor.h"

namespace switchyard {

// Where it is the same, f32 from bf16 or f16, which is exact, or bf16 from f16, rounded to nearest
// even.
bool can_become(Dtype from, Dtype into);

// Between views of equal shape in the host's memory, whose dtypes differ and can_become allows.
void convert(const ConstTensorView& from, const TensorView& into);

}  // namespace switchyard
