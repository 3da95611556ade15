// AdamW, its learning rate over time, and clipping by the norm of all gradients.
#pragma once

#include <cstdint>

#include "model/compute.h"
#include "model/parameters.h"
#include "options/config.h"
#include "switchyard/communicator.h"

namespace switchyard::train {

// Of step `step`, counted from 0: up to the highest in equal parts over the warm-up, then along a
// cosine to the final rate in the last of `steps`.
float learning_rate(const OptimizerConfig& config, std::int64_t step, std::int64_t steps);

// The norm over all parameters of gradients that are reduced already; each expert's part counts
// once, by its owner. Collective over `experts`, the ranks that experts are divided over; does not
// depend on how they are.
double gradient_norm(ParameterSet& gradients, Communicator& experts);

class AdamW {
 public:
  AdamW(const OptimizerConfig& config, const ParameterSet& values)
      : config_(config), first_(values.like()), second_(values.like()) {}

  // `step` counts from 0; gradients are scaled by `scale` first.
  void update(Compute& compute, ParameterSet& values, ParameterSet& gradients, std::int64_t step,
              float rate, float scale);

  ParameterSet& first_moment() { return first_; }
  ParameterSet& second_moment() { return second_; }

 private:
  OptimizerConfig config_;
  ParameterSet first_;
  ParameterSet second_;
};

}  // namespace switchyard::train
