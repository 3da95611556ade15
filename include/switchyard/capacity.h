// SPDX-License-Identifier: Apache-2.0
// Limits on how many of a rank's picks an expert takes, and scaling of its output in training.
// (Sizing is a different limit: the number of rows in a rank's buffers.)
#pragma once

namespace switchyard {

// Selects the picks that an expert keeps when a rank has more for it than its capacity. The
// capacity is max(1, ceil(T · K / E · factor)) for the T tokens of the rank, padding excluded. The
// other picks become −1: they are neither sent nor computed, and the remaining weights are not
// renormalised. Which picks are dropped depends on how tokens are divided over ranks, and so do the
// results.
enum class CapacityRule {
  // Applies the capacity to each pick index k separately and keeps the first tokens (KempnerForge).
  first_come,
  // Applies the capacity to all K together and keeps the picks with the highest routing weights.
  highest_weight,
};

// A limit on the assignments of each expert.
struct Capacity {
  double factor = 0.0;  // 0: no limit
  CapacityRule rule = CapacityRule::first_come;
};

// Selects a factor that multiplies an expert's output, in training only, so that experts with few
// rows learn as fast as experts with many. Backward treats the factor as a constant. n is the
// number of picks of the expert, before any are dropped.
enum class GradientScale {
  off,
  // KempnerForge: (rows of the owner's rank / experts of that rank) / n. Depends on the number of
  // ranks.
  rank,
  // (sum of n over all experts / E) / n, over all ranks of the batch. Does not depend on how the
  // batch is divided over ranks.
  global,
};

}  // namespace switchyard
