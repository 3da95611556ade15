// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/route/token_router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/given.h"
#include "device/cpu/simd/elements.h"

namespace switchyard::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kEpsilon = 1e-20F;

std::int64_t take_best(float* values, std::int64_t n) {
  const auto best = element_kernels().argmax(values, n);
  values[best] = kNone;
  return best;
}

bool is_repeat(const std::int32_t* ids, std::int64_t k) {
  return std::find(ids, ids + k, ids[k]) != ids + k;
}

}  // namespace

TokenRouter::TokenRouter(const RouterOptions& options, const RouterWeights& weights)
    : options_(options),
      expert_group_size_(options.num_experts / options.num_expert_groups),
      compared_(static_cast<std::size_t>(options.num_experts)),
      expert_group_scores_(static_cast<std::size_t>(options.num_expert_groups)),
      is_kept_(static_cast<std::size_t>(options.num_expert_groups)) {
  for (std::int64_t e = 0; is_given(weights.score_bias) && e < options.num_experts; ++e) {
    bias_.push_back(element(weights.score_bias, e));
  }
}

bool TokenRouter::score(float* logits) const {
  const auto& kernels = element_kernels();
  const auto n = std::int64_t{options_.num_experts};
  if (options_.score_bias == ScoreBias::logits && !bias_.empty()) {
    kernels.f32.add(reinterpret_cast<std::byte*>(logits), bias_.data(), n);
  }
  if (!kernels.all_finite(logits, n)) return false;
  (options_.score == ScoreFunction::softmax ? kernels.softmax : kernels.sigmoid)(logits, n);
  return true;
}

void TokenRouter::choose(const float* scores, std::int32_t* ids) {
  std::copy_n(scores, options_.num_experts, compared_.begin());
  if (options_.score_bias == ScoreBias::choice) {
    for (std::size_t e = 0; e < bias_.size(); ++e) compared_[e] += bias_[e];
  }
  if (options_.kept_expert_groups < options_.num_expert_groups) drop_expert_groups();
  for (std::int64_t k = 0; k < options_.top_k; ++k) {
    ids[k] = static_cast<std::int32_t>(take_best(compared_.data(), options_.num_experts));
  }
}

void TokenRouter::weigh(const float* scores, const std::int32_t* ids, float* weights) const {
  const float factor = options_.scale / divisor(scores, ids);
  for (std::int64_t k = 0; k < options_.top_k; ++k) {
    weights[k] = ids[k] < 0 ? 0.0F : scores[ids[k]] * factor;
  }
}

float TokenRouter::log_sum_exp(const float* logits) {
  const auto n = std::int64_t{options_.num_experts};
  probabilities_.assign(logits, logits + n);
  const auto best = element_kernels().argmax(logits, n);
  element_kernels().softmax(probabilities_.data(), n);
  return logits[best] - std::log(probabilities_[static_cast<std::size_t>(best)]);
}

void TokenRouter::backward(float* scores, const std::int32_t* ids, const Gradients& gradients) {
  const float* d_weights = gradients.d_weights;
  const auto n = std::int64_t{options_.num_experts};
  const float total = divisor(scores, ids);
  float weighted = 0.0F;
  for (std::int64_t k = 0; k < options_.top_k; ++k) {
    if (ids[k] >= 0) weighted += d_weights[k] * scores[ids[k]];
  }
  const float shift = options_.normalise == Normalise::chosen ? weighted / total : 0.0F;
  std::ranges::fill(compared_, 0.0F);  // holds d_scores from here on
  for (std::int64_t k = 0; k < options_.top_k; ++k) {
    if (ids[k] < 0) continue;
    compared_[static_cast<std::size_t>(ids[k])] += options_.scale * (d_weights[k] - shift) / total;
  }
  const bool is_dense = gradients.d_scores != nullptr;
  if (is_dense) add_loss_slopes(scores, gradients);
  const bool is_softmax = options_.score == ScoreFunction::softmax;
  const float mean = is_softmax ? mean_slope(scores, ids, is_dense) : 0.0F;
  for (std::int64_t e = 0; e < n; ++e) {
    const float slope = is_softmax ? 1.0F : 1.0F - scores[e];
    scores[e] = scores[e] * slope * (compared_[static_cast<std::size_t>(e)] - mean);
  }
  if (gradients.d_probabilities == 0.0F) return;
  for (std::int64_t e = 0; e < n; ++e) {
    scores[e] += gradients.d_probabilities * probabilities_[static_cast<std::size_t>(e)];
  }
}

void TokenRouter::add_loss_slopes(const float* scores, const Gradients& gradients) {
  float total = 1.0F;
  float mean = 0.0F;
  if (gradients.scores == LossScores::shares) {
    total = std::accumulate(scores, scores + options_.num_experts, kEpsilon);
    mean =
        std::inner_product(scores, scores + options_.num_experts, gradients.d_scores, 0.0F) / total;
  }
  for (std::size_t e = 0; e < compared_.size(); ++e) {
    compared_[e] += (gradients.d_scores[e] - mean) / total;
  }
}

// Returns Σ_e d_score · score, for softmax. If only the picks have a gradient, skips the others.
float TokenRouter::mean_slope(const float* scores, const std::int32_t* ids, bool is_dense) const {
  if (is_dense) return std::inner_product(compared_.begin(), compared_.end(), scores, 0.0F);
  float mean = 0.0F;
  for (std::int64_t k = 0; k < options_.top_k; ++k) {
    if (ids[k] < 0 || is_repeat(ids, k)) continue;
    mean += compared_[static_cast<std::size_t>(ids[k])] * scores[ids[k]];
  }
  return mean;
}

float TokenRouter::divisor(const float* scores, const std::int32_t* ids) const {
  if (options_.normalise == Normalise::none) return 1.0F;
  float total = 0.0F;
  for (std::int64_t k = 0; k < options_.top_k; ++k) {
    if (ids[k] >= 0) total += scores[ids[k]];
  }
  return total + kEpsilon;
}

void TokenRouter::drop_expert_groups() {
  for (int g = 0; g < options_.num_expert_groups; ++g) {
    const float* scores = compared_.data() + g * expert_group_size_;
    float best = kNone;
    float second = kNone;
    for (std::int64_t i = 0; i < expert_group_size_; ++i) {
      second = std::max(second, std::min(best, scores[i]));
      best = std::max(best, scores[i]);
    }
    expert_group_scores_[static_cast<std::size_t>(g)] =
        expert_group_size_ > 1 ? best + second : best;
  }
  is_kept_.assign(is_kept_.size(), false);
  for (int kept = 0; kept < options_.kept_expert_groups; ++kept) {
    const auto best = take_best(expert_group_scores_.data(), options_.num_expert_groups);
    is_kept_[static_cast<std::size_t>(best)] = true;
  }
  for (int g = 0; g < options_.num_expert_groups; ++g) {
    if (is_kept_[static_cast<std::size_t>(g)]) continue;
    std::fill_n(compared_.begin() + g * expert_group_size_, expert_group_size_, kNone);
  }
}

}  // namespace switchyard::cpu
