// Gradients of a scalar by central differences, in double precision: good to about nine digits.
#pragma once

#include <functional>

#include "support/reference/moe_reference.h"

namespace switchyard::testing {

using Loss = std::function<double()>;

// ∂loss/∂value for every value that is given; none gives none. The loss reads what is varied here,
// and the values are afterwards as before.
Doubles numeric_gradient(Doubles& values, const Loss& loss);
ReferenceExpert numeric_gradient(ReferenceExpert& expert, const Loss& loss);
ReferenceRouter numeric_gradient(ReferenceRouter& router, const Loss& loss);  // no score bias

// Of ⟨y, d_y⟩ of a whole layer, the choice of experts held fixed.
struct NumericLayerGradients {
  Doubles d_x;
  Doubles d_weights;  // [T, K] of the routing weights
  ReferenceWeights weights;
};
NumericLayerGradients numeric_gradients(const MoeLayerOptions& options, ReferenceWeights weights,
                                        Doubles x, const std::vector<std::int32_t>& expert_ids,
                                        const Doubles& d_y);

}  // namespace switchyard::testing
