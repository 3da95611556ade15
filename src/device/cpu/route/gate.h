// SPDX-License-Identifier: Apache-2.0
// The gate's matrix products, in f32 on panels of tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "core/given.h"
#include "core/memory_cache.h"
#include "device/cpu/scratch.h"
#include "switchyard/router.h"
#include "switchyard/tensor.h"

namespace switchyard::cpu {

class Gate {
 public:
  // Copies the gate to f32 unless it is f32 already.
  Gate(const RouterWeights& weights, MemoryCache& memory);

  std::int64_t num_experts() const { return gate_.rows(); }

  // Returns the logits of tokens first … last − 1, including the gate's bias: [padded tokens, E] in
  // scratch.
  float* logits(const ConstTensorView& x, std::int64_t first, std::int64_t last,
                Scratch& scratch) const;

  // d_x[first + i] += d_logits[i] · gate for last − first tokens. d_logits is padded like logits().
  void add_d_x(const float* d_logits, std::int64_t first, std::int64_t last, const TensorView& d_x,
               Scratch& scratch) const;

 private:
  ConstTensorView gate_;  // [E, H] f32
  std::vector<float> bias_;
};

// Columns first … last − 1 of gradient [E, H] are set to, or increased by, those of d_logitsᵀ · x,
// where d_logits is [T, E] f32.
struct GateGradient {
  ConstTensorView d_logits;
  ConstTensorView x;
  TensorView gradient;
  GradientMode mode = GradientMode::overwrite;
};
void gate_gradient(const GateGradient& args, std::int64_t first, std::int64_t last,
                   Scratch& scratch);

}  // namespace switchyard::cpu
