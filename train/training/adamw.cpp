// SPDX-License-Identifier: Apache-2.0
#include "training/adamw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <span>
#include <vector>

#include "common/sum_over_ranks.h"

namespace switchyard::train {
namespace {

// Adds squares in an order that depends only on the length.
double square_sum(std::span<const float> values) {
  std::array<double, 8> sums{};
  std::size_t i = 0;
  for (; i + sums.size() <= values.size(); i += sums.size()) {
    for (std::size_t j = 0; j < sums.size(); ++j) {
      const double v = values[i + j];
      sums[j] += v * v;
    }
  }
  for (; i < values.size(); ++i) sums[0] += double{values[i]} * double{values[i]};
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

struct Moments {
  float* value;
  const float* gradient;
  float* first;
  float* second;
};

struct Factors {
  float beta1, beta2;
  float rate;           // includes the first moment's bias correction
  float inverse_bias2;  // the second moment's bias correction
  float epsilon;
  float decay;  // 1 − rate · weight decay
  float scale;  // factor of gradients
};

void update_range(const Moments& m, const Factors& f, std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first; i < last; ++i) {
    const float g = m.gradient[i] * f.scale;
    const float m1 = f.beta1 * m.first[i] + (1.0F - f.beta1) * g;
    const float m2 = f.beta2 * m.second[i] + (1.0F - f.beta2) * g * g;
    m.first[i] = m1;
    m.second[i] = m2;
    m.value[i] = m.value[i] * f.decay - f.rate * m1 / (std::sqrt(m2 * f.inverse_bias2) + f.epsilon);
  }
}

}  // namespace

float learning_rate(const OptimizerConfig& config, std::int64_t step, std::int64_t steps) {
  if (step < config.warm_up) {
    return config.learning_rate * static_cast<float>(step + 1) / static_cast<float>(config.warm_up);
  }
  const auto length = std::max<std::int64_t>(1, steps - 1 - config.warm_up);
  const double progress =
      std::min(1.0, static_cast<double>(step - config.warm_up) / static_cast<double>(length));
  const double share = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return static_cast<float>(config.final_learning_rate +
                            (config.learning_rate - config.final_learning_rate) * share);
}

double gradient_norm(ParameterSet& gradients, Communicator& experts) {
  std::size_t num_experts = 0;
  for (const MoeBlock& block : gradients.blocks()) {
    num_experts = std::max(num_experts, static_cast<std::size_t>(block.placement.num_experts()));
  }
  // Indexed by layer and expert, so that the order of addition does not depend on who owns which.
  std::vector<double> by_expert(gradients.layers().size() * num_experts);
  double total = 0.0;
  for (const ParameterView& view : gradients.views()) {
    const double sum = square_sum(view.values.span<float>());
    if (view.expert < 0) {
      total += sum;
    } else {
      by_expert[static_cast<std::size_t>(view.layer) * num_experts +
                static_cast<std::size_t>(view.expert)] += sum;
    }
  }
  for (const double sum : sum_over_ranks(experts, by_expert)) total += sum;
  return std::sqrt(total);
}

void AdamW::update(Compute& compute, ParameterSet& values, ParameterSet& gradients,
                   std::int64_t step, float rate, float scale) {
  const auto steps = static_cast<double>(step + 1);
  const double bias1 = 1.0 - std::pow(double{config_.beta1}, steps);
  const double bias2 = 1.0 - std::pow(double{config_.beta2}, steps);
  const auto value_views = values.views();
  const auto gradient_views = gradients.views();
  const auto first_views = first_.views();
  const auto second_views = second_.views();
  for (std::size_t i = 0; i < value_views.size(); ++i) {
    const Moments moments{
        value_views[i].values.span<float>().data(), gradient_views[i].values.span<float>().data(),
        first_views[i].values.span<float>().data(), second_views[i].values.span<float>().data()};
    const Factors factors{
        .beta1 = config_.beta1,
        .beta2 = config_.beta2,
        .rate = static_cast<float>(rate / bias1),
        .inverse_bias2 = static_cast<float>(1.0 / bias2),
        .epsilon = config_.epsilon,
        .decay = value_views[i].decays ? 1.0F - rate * config_.weight_decay : 1.0F,
        .scale = scale};
    compute.for_each(value_views[i].values.shape().num_elements(),
                     [&](std::int64_t first, std::int64_t last) {
                       update_range(moments, factors, first, last);
                     });
  }
}

}  // namespace switchyard::train
