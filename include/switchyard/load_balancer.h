// SPDX-License-Identifier: Apache-2.0
// Balances the load of experts without a loss, by adjusting the bias of their scores after every
// step.
#pragma once

#include <cstdint>
#include <span>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

// How a LoadBalancer changes the score bias, given the counts n of the experts.
enum class BiasRule {
  // DeepSeek-V3 and TorchTitan: d = rate · sign(mean(n) − n); bias += d − mean(d).
  sign,
  // KempnerForge: ema = decay · ema + (1 − decay) · n/Σn; bias += rate · (1/E − ema).
  moving_average,
};

// Selects how the rate changes over training, with progress = step / num_steps.
enum class RateSchedule {
  constant,
  cosine,   // rate · (1 + cos(π · progress)) / 2
  warm_up,  // rate · min(1, 10 · progress)
};

// Options of a LoadBalancer.
struct LoadBalancerOptions {
  BiasRule rule = BiasRule::sign;
  float rate = 1e-3F;
  RateSchedule schedule = RateSchedule::constant;
  std::int64_t num_steps = 0;  // length of the training; required unless the schedule is constant
  float decay = 0.99F;         // decay of the moving average
};

// Balances one layer. Not collective: the same counts give the same bias on every rank.
class SWITCHYARD_API LoadBalancer {
 public:
  explicit LoadBalancer(int num_experts, const LoadBalancerOptions& options = {});

  // Adjusts score_bias [E] f32, in the memory of `device`. counts [E] are the assignments to each
  // expert in step `step`, over all ranks; steps count from 0. Does nothing if there are no
  // assignments. A GPU's bias is copied to the host and back, which waits for the GPU.
  void update(std::span<const std::int64_t> counts, std::int64_t step, const TensorView& score_bias,
              const Device& device = {});

  // Returns the rate in the given step. Throws InvalidArgument if the step is negative or, unless
  // the schedule is constant, beyond num_steps.
  float rate(std::int64_t step) const;
  // The moving average, [E] f32 in host memory, initially 1/E. Save it with the weights, and write
  // it back when they are loaded.
  TensorView moving_average() { return moving_average_; }
  const LoadBalancerOptions& options() const { return options_; }

 private:
  LoadBalancerOptions options_;
  Tensor moving_average_;
};

}  // namespace switchyard
