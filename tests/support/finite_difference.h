// SPDX-License-Identifier: Apache-2.0
// Gradients of a scalar by central differences in double precision, accurate to about nine digits.
#pragma once

#include <functional>

#include "support/reference/moe_reference.h"

namespace switchyard::testing {

using Loss = std::function<double()>;

// Returns ∂loss/∂value for every tensor that is given, and none for the others. `loss` must read
// the values passed here, which are restored afterwards.
Doubles numeric_gradient(Doubles& values, const Loss& loss);
ReferenceExpert numeric_gradient(ReferenceExpert& expert, const Loss& loss);
ReferenceRouter numeric_gradient(ReferenceRouter& router, const Loss& loss);  // no score bias

// Gradients of ⟨y, d_y⟩ for a whole layer, with the choice of experts fixed.
struct NumericLayerGradients {
  Doubles d_x;
  Doubles d_weights;  // [T, K] of the routing weights
  ReferenceWeights weights;
};
NumericLayerGradients numeric_gradients(const MoeLayerOptions& options, ReferenceWeights weights,
                                        Doubles x, const std::vector<std::int32_t>& expert_ids,
                                        const Doubles& d_y);

}  // namespace switchyard::testing
