// From a token's logits to its experts and weights, and back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/padding.h"
#include "switchyard/losses.h"
#include "switchyard/router.h"

namespace switchyard::cpu {

// A row of a table by token.
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

// For one token at a time, on one thread.
class TokenRouter {
 public:
  TokenRouter(const RouterOptions& options, const RouterWeights& weights);

  // Logits [E] become scores; false if they are not all finite.
  bool score(float* logits) const;
  // ids [K]: the best by score, ties to the lower id.
  void choose(const float* scores, std::int32_t* ids);
  // weights[k] of ids[k]; 0 for no pick.
  void weigh(const float* scores, const std::int32_t* ids, float* weights) const;
  // logsumexp of logits [E], without the score bias; leaves its gradient, their softmax, behind.
  float log_sum_exp(const float* logits);
  std::span<const float> probabilities() const { return probabilities_; }

  struct Gradients {
    const float* d_weights = nullptr;  // [K]
    const float* d_scores = nullptr;   // [E] of a loss, or none
    LossScores scores = LossScores::as_routed;
    // Of a loss: of the logits, as a multiple of the probabilities that log_sum_exp left.
    float d_probabilities = 0.0F;
  };
  // Scores [E] become the gradient of the logits.
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
  std::vector<float> probabilities_;        // [E], or none yet
  std::vector<float> expert_group_scores_;  // [num_expert_groups]
  std::vector<bool> is_kept_;               // [num_expert_groups]
};

}  // namespace switchyard::cpu
