// SPDX-License-Identifier: Apache-2.0
#include "support/reference/reference_losses.h"

#include <cmath>
#include <numeric>

namespace switchyard::testing {
namespace {

std::vector<double> logits_of(const ReferenceRouter& router, const double* x) {
  const auto hidden = router.gate.shape[1];
  std::vector<double> logits;
  for (std::int64_t e = 0; e < router.gate.rows(); ++e) {
    logits.push_back(std::inner_product(x, x + hidden, router.gate.row(e), 0.0));
    if (router.gate_bias.is_given()) {
      logits.back() += router.gate_bias.values[static_cast<std::size_t>(e)];
    }
  }
  return logits;
}

double log_sum_exp(const std::vector<double>& logits) {
  double sum = 0.0;
  for (const double logit : logits) sum += std::exp(logit);
  return std::log(sum);
}

std::vector<double> scores_of(const RouterOptions& options, const LossOptions& losses,
                              const ReferenceRouter& router, std::vector<double> logits) {
  if (options.score_bias == ScoreBias::logits && router.score_bias.is_given()) {
    for (std::size_t e = 0; e < logits.size(); ++e) logits[e] += router.score_bias.values[e];
  }
  const double total = log_sum_exp(logits);
  for (double& v : logits) {
    v = options.score == ScoreFunction::softmax ? std::exp(v - total) : 1.0 / (1.0 + std::exp(-v));
  }
  if (losses.scores == LossScores::shares) {
    const double sum = std::accumulate(logits.begin(), logits.end(), 0.0);
    for (double& v : logits) v /= sum;
  }
  return logits;
}

}  // namespace

ReferenceLosses reference_losses(const RouterOptions& options, const LossOptions& losses,
                                 const ReferenceRouter& router, const Doubles& x,
                                 const std::vector<std::int32_t>& expert_ids,
                                 std::int64_t sequence_tokens) {
  ReferenceLosses result;
  const auto num_tokens = x.rows();
  const auto experts = static_cast<std::size_t>(options.num_experts);
  const auto length = losses.balance == BalanceLoss::sequence ? sequence_tokens : num_tokens;
  for (std::int64_t first = 0; first < num_tokens; first += length) {
    std::vector<double> picks(experts, 0.0);
    std::vector<double> means(experts, 0.0);
    for (std::int64_t t = first; t < first + length; ++t) {
      const auto logits = logits_of(router, x.row(t));
      result.z += std::pow(log_sum_exp(logits), 2) / static_cast<double>(num_tokens);
      const auto scores = scores_of(options, losses, router, logits);
      for (std::size_t e = 0; e < experts; ++e) {
        means[e] += scores[e] / static_cast<double>(length);
      }
      for (std::int64_t k = 0; k < options.top_k; ++k) {
        picks[static_cast<std::size_t>(
            expert_ids[static_cast<std::size_t>(t * options.top_k + k)])] += 1.0;
      }
    }
    const auto sequences = static_cast<double>(num_tokens / length);
    const auto all_picks = static_cast<double>(length * options.top_k);
    for (std::size_t e = 0; e < experts; ++e) {
      result.balance += static_cast<double>(experts) * picks[e] / all_picks * means[e] / sequences;
    }
  }
  return result;
}

}  // namespace switchyard::testing
