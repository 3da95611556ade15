// From a router's sums to its losses, and back to the slopes of its scores.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "device/router_sums.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/losses.h"

namespace switchyard {

// Zeros in the device's memory, for so many sequences of so many tokens.
RouterSums zero_sums(const Device& device, const LossOptions& losses, std::int64_t num_experts,
                     std::int64_t num_sequences, std::int64_t sequence_tokens);
inline std::int64_t bytes_of(const RouterSums& sums) {
  return sums.by_sequence.bytes() + sums.squares.bytes();
}

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
  // Collective over `sequence` where sequences are cut over ranks, and over `batch` where the
  // caller wants totals over it. Either may be null: no others. Where there are others the device
  // is waited for; alone, nothing leaves it.
  LossTerms(Device device, const RouterSums& sums, std::int64_t top_k, Communicator* sequence,
            Communicator* batch);

  // [E] i64 in the device's memory, over what the losses are over: the ranks of `batch`, or this
  // one.
  ConstTensorView picks() const { return totals_.slice(0, own_.num_experts); }
  // Besides the sums that were given.
  std::int64_t bytes() const;
  // Waits for the device where this rank is alone.
  RouterLosses values() const;
  // What reaches this rank's tokens, when d_losses reach the losses.
  RouterSlopes slopes(const RouterLosses& d_losses) const;

 private:
  void sum_over_ranks(Communicator* sequence, Communicator* batch);

  Device device_;
  RouterSums own_;
  // Of sequences cut over ranks: the rows of all ranks that have a part of them.
  std::optional<RouterSums> joined_;
  std::int64_t top_k_;
  TensorView totals_;                    // [loss_total_words(E)] i64
  std::optional<BatchTotals> of_ranks_;  // where there are others
};

}  // namespace switchyard
