// How many of a rank's picks an expert takes, and how far its output counts. (How many rows a rank
// has room for is another matter: Sizing.)
#pragma once

namespace switchyard {

// Which picks an expert keeps when a rank has more for it than its capacity,
// max(1, ceil(T · K / E · factor)) for the T tokens of the rank. The others become −1: they are
// neither sent nor computed, and the weights that stay are not renormalised. What is dropped
// depends on how tokens are divided over ranks, and so do the results.
enum class CapacityRule {
  first_come,      // for each of the K picks by itself, the first tokens (KempnerForge)
  highest_weight,  // over all of them, those with the highest routing weights
};

struct Capacity {
  double factor = 0.0;  // 0: no limit
  CapacityRule rule = CapacityRule::first_come;
};

// Multiplies an expert's output, in training only, so that experts with few rows learn as fast as
// those with many. The factor counts as constant in backward; n are picks before any are dropped.
enum class GradientScale {
  off,
  // KempnerForge: (rows for the owner's rank / experts of that rank) / n. Depends on the number of
  // ranks.
  rank,
  // (n of all experts / E) / n, over all ranks of the batch: the same however they are divided.
  global,
};

}  // namespace switchyard
