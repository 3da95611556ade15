// SPDX-License-Identifier: Apache-2.0
#include "peer/sum_over_ranks.h"

#include "comm/sum_integers.h"
#include "device/device_backend.h"
#include "switchyard/error.h"

namespace switchyard {

SumOverRanks::SumOverRanks(Communicator& comm, const Device& device, bool uses_peer_memory,
                           std::int64_t num_words)
    : comm_(comm), device_(device) {
  if (!uses_peer_memory || comm.size() == 1) return;
  try {
    meetings_ = std::make_shared<PeerMeetings>(PeerMemory::of(comm, device), num_words);
  } catch (const Unsupported&) {  // thrown on all ranks: they cannot reach each other's memory
  }
}

void SumOverRanks::check() const {
  if (meetings_ != nullptr) meetings_->check();
}

void SumOverRanks::spoil(std::span<const TensorView> views) const {
  if (meetings_ != nullptr) backend_of(device_).spoil(meetings_->memory().failed(), views);
}

std::weak_ptr<const PeerCheck> SumOverRanks::peer_check() const {
  return meetings_ != nullptr ? meetings_->memory_check() : std::weak_ptr<const PeerCheck>();
}

void SumOverRanks::add_up(const TensorView& words) const {
  if (comm_.size() == 1) return;
  const DeviceBackend& device = backend_of(device_);
  if (meetings_ != nullptr) {
    const TensorView gathered = device.take({comm_.size(), words.rows()}, Dtype::i64);
    meetings_->gather(Meeting::sums, {}, words, gathered);
    return device.sum_words(gathered, words);
  }
  Tensor numbers = device_.to_host(words);
  sum_integers(comm_, {numbers.span<std::int64_t>()});
  device.upload(std::as_bytes(numbers.span<std::int64_t>()), words);
}

}  // namespace switchyard
