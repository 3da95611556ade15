// SPDX-License-Identifier: Apache-2.0
// The two rules that adapt the bias to the counts, and the schedule of their rate.
#include "switchyard/load_balancer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/require.h"
#include "core/standard_floats.h"
#include "moe/check_tensors.h"

namespace switchyard {
namespace {

void require_valid(const LoadBalancerOptions& o) {
  require(std::isfinite(o.rate) && o.rate >= 0.0F, "rate ({}) must be finite and not negative",
          o.rate);
  require(o.decay >= 0.0F && o.decay < 1.0F, "decay ({}) must be at least 0 and less than 1",
          o.decay);
  require(o.schedule == RateSchedule::constant || o.num_steps > 0,
          "num_steps ({}) must be positive when the rate changes during training", o.num_steps);
}

std::int64_t checked_sum(std::span<const std::int64_t> counts) {
  std::int64_t sum = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    require(counts[e] >= 0, "counts[{}] ({}) must not be negative", e, counts[e]);
    require(counts[e] <= std::numeric_limits<std::int64_t>::max() - sum,
            "counts[{}] ({}) is too large to be added to the {} before it", e, counts[e], sum);
    sum += counts[e];
  }
  return sum;
}

// Returns sign(sum / num_experts − count), computed exactly.
int sign_of_shortage(std::int64_t count, std::int64_t sum, std::int64_t num_experts) {
  const auto mean = sum / num_experts;
  if (count != mean) return count < mean ? 1 : -1;
  return sum % num_experts != 0 ? 1 : 0;
}

void follow_signs(std::span<const std::int64_t> counts, std::int64_t sum, float rate,
                  std::span<float> bias) {
  const auto num_experts = static_cast<std::int64_t>(counts.size());
  std::int64_t signs = 0;
  for (const auto count : counts) signs += sign_of_shortage(count, sum, num_experts);
  const float mean = static_cast<float>(signs) / static_cast<float>(num_experts);
  for (std::size_t e = 0; e < counts.size(); ++e) {
    const auto sign = static_cast<float>(sign_of_shortage(counts[e], sum, num_experts));
    bias[e] += rate * (sign - mean);
  }
}

void follow_average(std::span<const std::int64_t> counts, std::int64_t sum,
                    const LoadBalancerOptions& options, float rate, std::span<float> average,
                    std::span<float> bias) {
  const float even = 1.0F / static_cast<float>(counts.size());
  for (std::size_t e = 0; e < counts.size(); ++e) {
    const float share = static_cast<float>(counts[e]) / static_cast<float>(sum);
    average[e] += (1.0F - options.decay) * (share - average[e]);
    bias[e] += rate * (even - average[e]);
  }
}

}  // namespace

LoadBalancer::LoadBalancer(int num_experts, const LoadBalancerOptions& options)
    : options_(options) {
  require(num_experts > 0, "num_experts ({}) must be positive", num_experts);
  require_valid(options);
  moving_average_ = Tensor({num_experts}, Dtype::f32);
  std::ranges::fill(moving_average_.span<float>(), 1.0F / static_cast<float>(num_experts));
}

float LoadBalancer::rate(std::int64_t step) const {
  require(step >= 0, "step ({}) must not be negative", step);
  if (options_.schedule == RateSchedule::constant) return options_.rate;
  require(step <= options_.num_steps, "step ({}) is beyond num_steps ({})", step,
          options_.num_steps);
  const double progress = static_cast<double>(step) / static_cast<double>(options_.num_steps);
  const double factor = options_.schedule == RateSchedule::cosine
                            ? (1.0 + std::cos(std::numbers::pi * progress)) / 2.0
                            : std::min(1.0, 10.0 * progress);
  return static_cast<float>(options_.rate * factor);
}

void LoadBalancer::update(std::span<const std::int64_t> counts, std::int64_t step,
                          const TensorView& score_bias, const Device& device) {
  const auto num_experts = moving_average_.rows();
  require(static_cast<std::int64_t>(counts.size()) == num_experts,
          "there are {} counts for {} experts", counts.size(), num_experts);
  require_vector(score_bias, num_experts, "score_bias");
  require(score_bias.dtype() == Dtype::f32, "score_bias is {}, but must be f32",
          name_of(score_bias.dtype()));
  require_on_device(score_bias, device.memory(), "score_bias");
  const StandardFloats standard;
  const auto sum = checked_sum(counts);
  const float now = rate(step);
  if (sum == 0) return;
  const auto follow = [&](std::span<float> bias) {
    if (options_.rule == BiasRule::sign) return follow_signs(counts, sum, now, bias);
    follow_average(counts, sum, options_, now, moving_average_.span<float>(), bias);
  };
  if (device.memory() == Memory::host) return follow(score_bias.span<float>());
  Tensor staged = device.to_host(score_bias);
  follow(staged.span<float>());
  device.copy(staged, score_bias);
}

}  // namespace switchyard
