// Keeps experts evenly loaded without a loss: moves the bias of their scores after every step.
#pragma once

#include <cstdint>
#include <span>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

enum class BiasRule {
  // DeepSeek-V3 and TorchTitan: d = rate · sign(mean(n) − n); bias += d − mean(d)
  sign,
  // KempnerForge: ema = decay · ema + (1 − decay) · n/Σn; bias += rate · (1/E − ema)
  moving_average,
};

// What becomes of the rate over training, with progress = step / num_steps.
enum class RateSchedule {
  constant,
  cosine,   // rate · (1 + cos(π · progress)) / 2
  warm_up,  // rate · min(1, 10 · progress)
};

struct LoadBalancerOptions {
  BiasRule rule = BiasRule::sign;
  float rate = 1e-3F;
  RateSchedule schedule = RateSchedule::constant;
  std::int64_t num_steps = 0;  // of the training; needed unless the schedule is constant
  float decay = 0.99F;         // of the moving average
};

// Of one layer. Not collective: given the same counts it does the same on every rank.
class SWITCHYARD_API LoadBalancer {
 public:
  explicit LoadBalancer(int num_experts, const LoadBalancerOptions& options = {});

  // counts [E]: the assignments to each expert in step `step`, counted from 0, over all ranks;
  // score_bias [E] f32 in the memory of `device`. Without any assignments nothing changes. A GPU's
  // comes to the host and goes back, which waits for it.
  void update(std::span<const std::int64_t> counts, std::int64_t step, const TensorView& score_bias,
              const Device& device = {});

  // The rate of a step.
  float rate(std::int64_t step) const;
  // [E] f32 in the host's memory, at first 1/E: to be saved with the weights and written when they
  // are loaded.
  TensorView moving_average() { return moving_average_; }
  const LoadBalancerOptions& options() const { return options_; }

 private:
  LoadBalancerOptions options_;
  Tensor moving_average_;
};

}  // namespace switchyard
