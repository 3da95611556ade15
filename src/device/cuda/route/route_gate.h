// SPDX-License-Identifier: Apache-2.0
// The gate's products on a GPU. The bits of a token's results depend only on the token, the sizes
// and the dtypes.
#pragma once

#include <cstdint>

#include "device/cuda/runtime/context.h"
#include "switchyard/router.h"

namespace switchyard::cuda {

// Returns uninitialised [T, E] f32 with rows aligned to 16 bytes.
TensorView take_logits(std::int64_t num_tokens, std::int64_t num_experts, Context& context);

// logits [T, E] = x · gateᵀ [+ gate bias], in f32. For T > 0.
void gate_logits(const ConstTensorView& x, const RouterWeights& weights, const TensorView& logits,
                 Context& context);

// The gradient of the logits, [T, E]. For tokens in bf16 also as the sum of two bf16 terms, which
// leaves a relative error of 2⁻¹⁷.
struct DLogits {
  // From take_logits. Still the logits if x and gate are bf16 and no gradient of the gate's bias is
  // asked for.
  TensorView values;
  TensorView main = {};  // rows aligned to 16 bytes
  TensorView rest = {};  // likewise
};

// d_x [T, H] += d_logits · gate. For T > 0.
void add_gate_d_x(const DLogits& d_logits, const ConstTensorView& gate, const TensorView& d_x,
                  Context& context);

// Computes the gradients of the gate, d_logitsᵀ · x, and of its bias, over the tokens that take
// part. For other tokens x may hold NaN. T may be 0.
struct GateGradients {
  const DLogits& d_logits;   // 0 where a token takes no part
  ConstTensorView has_part;  // [T] i32
  ConstTensorView x;         // [T, H]
  const RouterGradients& gradients;
  GradientMode mode = GradientMode::overwrite;
};
void gate_gradients(const GateGradients& args, Context& context);

}  // namespace switchyard::cuda
