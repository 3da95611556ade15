// From a router's sums to its losses, and back to the slopes of its scores.
#pragma once

#include <cstdint>
#include <vector>

#include "device/router_sums.h"
#include "switchyard/communicator.h"
#include "switchyard/losses.h"

namespace switchyard {

// Sums over the ranks of a batch.
struct BatchTotals {
  std::vector<std::int64_t> picks;   // [E]
  std::vector<std::int64_t> scores;  // [E] in units of 2⁻³²
  std::int64_t num_tokens = 0;
  std::int64_t squares = 0;           // whole parts
  std::int64_t square_fractions = 0;  // in units of 2⁻³²
  std::int64_t num_sequences = 0;     // that have tokens
  std::int64_t sequence_losses = 0;   // whole parts of their sum
  std::int64_t loss_fractions = 0;    // in units of 2⁻³²
};

// Of one training forward.
class LossTerms {
 public:
  // Collective over `sequence` where sequences are cut over ranks, which then adds up their rows of
  // `sums`, and over `batch` where the caller wants totals over it. Either may be null: no others.
  LossTerms(RouterSums sums, std::int64_t top_k, Communicator* sequence, Communicator* batch);

  // What the losses are over: the ranks of `batch`, or this one.
  const BatchTotals& totals() const { return totals_; }
  std::int64_t bytes() const { return sums_.by_sequence.bytes() + sums_.squares.bytes(); }
  RouterLosses values() const;
  // What reaches this rank's tokens, when d_losses reach the losses.
  RouterSlopes slopes(const RouterLosses& d_losses) const;

 private:
  void count_sequences();

  RouterSums sums_;
  std::int64_t top_k_;
  BatchTotals totals_;
};

}  // namespace switchyard
