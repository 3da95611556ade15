// Tables of whole numbers, added up over the ranks of a group.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "peer/peer_memory.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"

namespace switchyard {

// By the devices, where these reach each other's memory and are to use it; otherwise the hosts wait
// for them and add up.
class SumOverRanks {
 public:
  // Collective: for tables of so many words.
  SumOverRanks(Communicator& comm, const Device& device, bool uses_peer_memory,
               std::int64_t num_words);

  // Collective: words [num_words] i64 in the device's memory become their sums.
  void add_up(const TensorView& words) const;

  // As a mover's: what a sum before this could not throw, and NaN for what is made of it.
  void check() const;
  void spoil(std::span<const TensorView> views) const;
  // Who knows whether a rank has failed; none where hosts add up.
  std::weak_ptr<const PeerCheck> peer_check() const;

 private:
  Communicator& comm_;
  Device device_;
  std::shared_ptr<PeerMeetings> meetings_;
};

}  // namespace switchyard
