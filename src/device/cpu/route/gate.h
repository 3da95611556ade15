// The gate's products, in f32 on panels of tokens.
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
  // Widens the gate if it is not f32 already.
  Gate(const RouterWeights& weights, MemoryCache& memory);

  std::int64_t num_experts() const { return gate_.rows(); }

  // [padded tokens, E] in scratch: logits of tokens first … last − 1, the gate's bias added.
  float* logits(const ConstTensorView& x, std::int64_t first, std::int64_t last,
                Scratch& scratch) const;

  // d_x[first + i] += d_logits[i] · gate, for last − first tokens; d_logits is padded.
  void add_d_x(const float* d_logits, std::int64_t first, std::int64_t last, const TensorView& d_x,
               Scratch& scratch) const;

 private:
  ConstTensorView gate_;  // [E, H] f32
  std::vector<float> bias_;
};

// Columns first … last − 1 of gradient [E, H]: [+]= d_logitsᵀ · x, with d_logits [T, E] f32.
struct GateGradient {
  ConstTensorView d_logits;
  ConstTensorView x;
  TensorView gradient;
  GradientMode mode = GradientMode::overwrite;
};
void gate_gradient(const GateGradient& args, std::int64_t first, std::int64_t last,
                   Scratch& scratch);

}  // namespace switchyard::cpu
