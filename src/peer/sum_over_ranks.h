// SPDX-License-Identifier: Apache-2.0
// Sums tables of integers over the ranks of a group.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "peer/peer_memory.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"

namespace switchyard {

// The devices add if they can reach each other's memory and `uses_peer_memory` is set. Otherwise
// the hosts wait for the devices and add.
class SumOverRanks {
 public:
  // Collective. `num_words` is the size of the tables.
  SumOverRanks(Communicator& comm, const Device& device, bool uses_peer_memory,
               std::int64_t num_words);

  // Collective. Replaces words [num_words] i64, in the device's memory, by their sums over the
  // ranks.
  void add_up(const TensorView& words) const;

  // Like those of a mover: check() throws the error of an earlier failed sum, and spoil() sets
  // results computed from such a sum to NaN.
  void check() const;
  void spoil(std::span<const TensorView> views) const;
  // Reports whether a rank has failed. Empty if the hosts do the adding.
  std::weak_ptr<const PeerCheck> peer_check() const;

 private:
  Communicator& comm_;
  Device device_;
  std::shared_ptr<PeerMeetings> meetings_;
};

}  // namespace switchyard
