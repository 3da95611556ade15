// SPDX-License-Identifier: Apache-2.0
// Turns a token's logits into its experts and weights, and computes the gradient of the logits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/padding.h"
#include "switchyard/losses.h"
#include "switchyard/router.h"

namespace switchyard::cpu {

// Returns one token's row of a table.
template <typename T>
T* row_of(const TensorView& table, std::int64_t row) {
  return reinterpret_cast<T*>(table.row(row));
}
template <typename T>
const T* row_of(const ConstTensorView& table, std::int64_t row) {
  return reinterpret_cast<const T*>(table.row(row));
}

inline bool is_valid(const std::optional<ConstTensorView>& valid, std::int64_t token) {
  return !valid || switchyard::is_valid(*valid, token);
}

// Routes one token at a time, on one thread.
class TokenRouter {
 public:
  TokenRouter(const RouterOptions& options, const RouterWeights& weights);

  // Replaces logits [E] by scores. Returns false if they are not all finite.
  bool score(float* logits) const;
  // Fills ids [K] with the experts of the highest scores. Ties go to the lower id.
  void choose(const float* scores, std::int32_t* ids);
  // Fills weights [K] for these ids; 0 for no pick.
  void weigh(const float* scores, const std::int32_t* ids, float* weights) const;
  // Returns the logsumexp of logits [E], without the score bias. Leaves its gradient, the softmax
  // of the logits, in probabilities().
  float log_sum_exp(const float* logits);
  std::span<const float> probabilities() const { return probabilities_; }

  struct Gradients {
    const float* d_weights = nullptr;  // [K]
    const float* d_scores = nullptr;   // [E] from a loss, or null
    LossScores scores = LossScores::as_routed;
    // A loss's gradient of the logits, as a multiple of the probabilities that log_sum_exp() left.
    float d_probabilities = 0.0F;
  };
  // Replaces scores [E] by the gradient of the logits.
  void backward(float* scores, const std::int32_t* ids, const Gradients& gradients);

 private:
  float divisor(const float* scores, const std::int32_t* ids) const;
  void drop_expert_groups();
  void add_loss_slopes(const float* scores, const Gradients& gradients);
  float mean_slope(const float* scores, const std::int32_t* ids, bool is_dense) const;

  const RouterOptions& options_;
  std::int64_t expert_group_size_;
  std::vector<float> bias_;
  std::vector<float> compared_;             // [E]
  std::vector<float> probabilities_;        // [E]; empty before log_sum_exp()
  std::vector<float> expert_group_scores_;  // [num_expert_groups]
  std::vector<bool> is_kept_;               // [num_expert_groups]
};

}  // namespace switchyard::cpu
