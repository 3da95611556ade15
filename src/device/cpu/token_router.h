// From a token's logits to its experts and weights, and back.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/router.h"

namespace switchyard::cpu {

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
  // Scores [E] become the gradient of the logits.
  void backward(float* scores, const std::int32_t* ids, const float* d_weights);

 private:
  float divisor(const float* scores, const std::int32_t* ids) const;
  void drop_groups();

  const RouterOptions& options_;
  std::int64_t group_size_;
  std::vector<float> bias_;
  std::vector<float> compared_;      // [E]
  std::vector<float> group_scores_;  // [groups]
  std::vector<bool> is_kept_;        // [groups]
};

}  // namespace switchyard::cpu
