// The losses that keep a router's load even and its logits small.
#pragma once

namespace switchyard {

// Over whose tokens losses are.
enum class LossScope {
  global,  // those of all ranks: a step does not depend on how they are divided
  rank,    // this rank's own (KempnerForge); of cut sequences, all of those that it has a part of
};

// Switch Transformer's: E · Σ_e f_e · P_e, with f_e = picks of expert e / (T · K) and P_e the mean
// score of e over the T tokens. f_e counts as constant.
enum class BalanceLoss {
  none,
  batch,     // over all tokens at once
  sequence,  // for each sequence by itself; the mean of them
};

// Which scores P_e is the mean of.
enum class LossScores {
  as_routed,
  shares,  // s_e / Σ s of the token (DeepSeek-V3); for softmax scores the same
};

struct LossOptions {
  BalanceLoss balance = BalanceLoss::none;
  LossScores scores = LossScores::as_routed;
  // The mean over tokens of logsumexp(logits)², without the score bias; at most 2⁴⁰ of each counts.
  bool z = false;
  LossScope scope = LossScope::global;
};

// The losses of one forward, or the gradients that reach them: what the caller weighs them with.
struct RouterLosses {
  float balance = 0.0F;
  float z = 0.0F;
};

}  // namespace switchyard
