// SPDX-License-Identifier: Apache-2.0
// A slow, obvious layer to check results against: plain loops in double precision in one process.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/moe_layer.h"

namespace switchyard::cli {

// A matrix or vector; empty if there is none.
struct Doubles {
  std::int64_t columns = 0;
  std::vector<double> values = {};

  bool is_given() const { return !values.empty(); }
  std::int64_t rows() const {
    return columns == 0 ? 0 : static_cast<std::int64_t>(values.size()) / columns;
  }
  double* row(std::int64_t r) { return values.data() + r * columns; }
  const double* row(std::int64_t r) const { return values.data() + r * columns; }
};
// Converts an f32 or bf16 view in host memory, whose rows may be strided.
Doubles doubles_of(const ConstTensorView& view);

using PlainExpert = BasicExpertTensors<Doubles>;
using PlainWeights = BasicMoeTensors<Doubles>;  // with all experts
PlainWeights doubles_of(const MoeWeights& weights);
// Lists all tensors, in the same order for equal options.
std::vector<Doubles*> tensors_of(PlainWeights& weights);

// Everything that the loss of a step depends on: ⟨y, d_y⟩ plus the weighted losses of the router.
struct PlainStep {
  const MoeLayerOptions& options;
  Doubles x;    // [T, H]
  Doubles d_y;  // [T, H]
  PlainWeights weights;
  std::vector<std::int32_t> ids = {};  // [T·K] as routed; −1: no pick
  std::vector<bool> is_kept = {};      // [T·K]: true if the assignment has a row
  std::vector<bool> is_valid = {};     // [T]
  Doubles given_weights = {};          // [T, K]; if empty, the router's weights are used
  Doubles added_weights = {};          // [T, K], added to either; if empty, 0
  RouterLosses d_losses = {};
};

struct PlainResult {
  Doubles y;
  double balance = 0.0;
  double z = 0.0;
  double loss = 0.0;
};
PlainResult compute(const PlainStep& step);

// Returns, for the worst token, how far its lowest-scoring pick lies below the best expert that it
// did not pick. This is at most 0 if the router picked the best experts.
double worst_choice(const PlainStep& step);

}  // namespace switchyard::cli
