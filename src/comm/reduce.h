// The local half of a reduction.
#pragma once

#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard {

// pieces [ranks, n] → result, n elements: ((p0 ∘ p1) ∘ p2) ∘ …, in f32 for bf16, rounded once.
void reduce_in_rank_order(const ConstTensorView& pieces, const TensorView& result, ReduceOp op);

}  // namespace switchyard
