// The slow, obvious layer to check results by: one loop an idea, double precision, one process.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/moe_layer.h"

namespace switchyard::cli {

// A matrix or vector; empty where there is none.
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
// f32 or bf16 in the host's memory, rows apart or not.
Doubles doubles_of(const ConstTensorView& view);

using PlainExpert = BasicExpertTensors<Doubles>;
using PlainWeights = BasicMoeTensors<Doubles>;  // of all experts
PlainWeights doubles_of(const MoeWeights& weights);
// Every tensor of them, in the same order for equal options.
std::vector<Doubles*> tensors_of(PlainWeights& weights);

// Everything that a step's loss ⟨y, d_y⟩ + the weighed losses of the router depends on.
struct PlainStep {
  const MoeLayerOptions& options;
  Doubles x;    // [T, H]
  Doubles d_y;  // [T, H]
  PlainWeights weights;
  std::vector<std::int32_t> ids = {};  // [T·K] as routed; −1: none
  std::vector<bool> is_kept = {};      // [T·K] whether the assignment has a row
  std::vector<bool> is_valid = {};     // [T]
  Doubles given_weights = {};          // [T, K]; none: the router's
  Doubles added_weights = {};          // [T, K] on top of either; none: 0
  RouterLosses d_losses = {};
};

struct PlainResult {
  Doubles y;
  double balance = 0.0;
  double z = 0.0;
  double loss = 0.0;
};
PlainResult compute(const PlainStep& step);

// How far the worst of a token's picks scores below the best expert that it did not pick; at most 0
// where the router picked the best.
double worst_choice(const PlainStep& step);

}  // namespace switchyard::cli
