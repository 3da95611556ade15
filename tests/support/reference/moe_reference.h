// SPDX-License-Identifier: Apache-2.0
// A slow, obvious reference for a whole layer: one process, all tokens, double precision.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/moe_layer.h"

namespace switchyard::testing {

// A tensor in double precision. A default-constructed one is absent, like a default view.
struct Doubles {
  Shape shape = {};
  std::vector<double> values = {};

  bool is_given() const { return !values.empty(); }
  std::int64_t rows() const { return shape[0]; }
  double* row(std::int64_t r) { return values.data() + r * shape.row_elements(); }
  const double* row(std::int64_t r) const { return values.data() + r * shape.row_elements(); }
};
Doubles zeros(const Shape& shape);
Doubles doubles_of(const ConstTensorView& view);  // f32 or bf16
Tensor tensor_of(const Doubles& doubles);         // f32
double dot(const Doubles& a, const Doubles& b);

using ReferenceRouter = BasicRouterTensors<Doubles>;
using ReferenceExpert = BasicExpertTensors<Doubles>;
using ReferenceWeights = BasicMoeTensors<Doubles>;  // with the experts of all ranks
ReferenceRouter doubles_of(const RouterWeights& weights);
ReferenceExpert doubles_of(const ExpertWeights& weights);
ReferenceWeights doubles_of(const MoeWeights& weights);

struct ReferenceRouting {
  std::vector<std::int32_t> expert_ids = {};  // [T · K]; −1: no pick
  Doubles weights = {};                       // [T, K]
};

ReferenceRouting reference_route(const RouterOptions& options, const ReferenceRouter& router,
                                 const Doubles& x);
// Returns the weights that the router gives to these ids.
Doubles reference_replay(const RouterOptions& options, const ReferenceRouter& router,
                         const Doubles& x, const std::vector<std::int32_t>& expert_ids);

// Returns what one row adds to y: weight · expert(x), or expert(weight · x) if the weight enters at
// the input.
std::vector<double> reference_expert(const ExpertsOptions& options, const ReferenceExpert& expert,
                                     const double* x, double weight);

// Returns y [T, H].
Doubles reference_layer(const MoeLayerOptions& options, const ReferenceWeights& weights,
                        const Doubles& x, const ReferenceRouting& routing);

}  // namespace switchyard::testing
