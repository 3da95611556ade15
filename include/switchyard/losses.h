// SPDX-License-Identifier: Apache-2.0
// Losses that balance a router's load and keep its logits small.
#pragma once

namespace switchyard {

// Selects the tokens that losses cover.
enum class LossScope {
  global,  // the tokens of all ranks of the batch: a step does not depend on how they are divided
  // The tokens of this rank, as in KempnerForge. If sequences are split over ranks, all tokens of
  // every sequence of which this rank holds a piece.
  rank,
};

// Selects the balance loss of Switch Transformer: E · Σ_e f_e · P_e, where f_e is the share of the
// T · K picks that go to expert e, and P_e is the mean score of e over the T tokens, padding
// excluded. f_e is treated as a constant in backward.
enum class BalanceLoss {
  none,
  batch,     // over all tokens at once
  sequence,  // for each sequence separately; the loss is their mean
};

// Selects the scores that P_e averages.
enum class LossScores {
  as_routed,
  shares,  // each token's scores divided by their sum (DeepSeek-V3); the same for softmax
};

// The auxiliary losses of a layer.
struct LossOptions {
  BalanceLoss balance = BalanceLoss::none;
  LossScores scores = LossScores::as_routed;
  // Adds the z-loss: the mean over tokens of logsumexp(logits)², without the score bias. Each
  // square is capped at 2⁴⁰.
  bool z = false;
  LossScope scope = LossScope::global;
};

// The losses of one forward or, in backward, the gradients with respect to them, which are the
// weights that the caller gives them.
struct RouterLosses {
  float balance = 0.0F;
  float z = 0.0F;
};

}  // namespace switchyard
