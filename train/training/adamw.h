// SPDX-License-Identifier: Apache-2.0
// AdamW, its learning-rate schedule, and clipping by the norm of all gradients.
#pragma once

#include <cstdint>

#include "model/compute.h"
#include "model/parameters.h"
#include "options/config.h"
#include "switchyard/communicator.h"

namespace switchyard::train {

// Returns the rate of `step`, counted from 0. It rises linearly to the peak during the warm-up,
// then follows a cosine to the final rate in the last of `steps`.
float learning_rate(const OptimizerConfig& config, std::int64_t step, std::int64_t steps);

// Returns the norm over all parameters of gradients that are already reduced. Each expert counts
// once, on its owner. Collective over `experts`, the ranks that experts are divided over; the
// result does not depend on how they are divided.
double gradient_norm(ParameterSet& gradients, Communicator& experts);

class AdamW {
 public:
  AdamW(const OptimizerConfig& config, const ParameterSet& values)
      : config_(config), first_(values.like()), second_(values.like()) {}

  // `step` counts from 0. Gradients are multiplied by `scale` first.
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
