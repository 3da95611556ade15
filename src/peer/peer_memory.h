// Memory through which the ranks of a group hand each other tokens without their hosts: what it is,
// how ranks meet in it, and what becomes of it when one fails.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "device/device_backend.h"
#include "peer/peer_group.h"
#include "switchyard/communicator.h"

namespace switchyard {

class GroupListener;

// One rank's part of it. Ranks are threads of one process or processes of one host, each with a
// device of its own; the communicator is used to set it up, and to tell who failed.
//
// A failure is for good: every later call throws, and the heaps, which a late rank may still write
// to, are given back when all ranks have let go of them.
class PeerMemory final : public PeerCheck {
 public:
  // Collective. What the group has already for these devices, or a new one. Throws Unsupported on
  // every rank where ranks cannot reach each other's memory: on other hosts, or on GPUs that are
  // no peers.
  static std::shared_ptr<PeerMemory> of(Communicator& comm, const Device& device);

  PeerMemory(Communicator& comm, Device device, PeerGroup group,
             std::shared_ptr<GroupListener> listener);
  ~PeerMemory() override;

  // Of this rank's heap. Peers may still read or write what was there before: nothing is written to
  // it before a meeting.
  TensorView take(const Shape& shape, Dtype dtype) const;
  bool holds(const ConstTensorView& view) const { return group_.heap->holds(view); }
  std::int64_t offset_of(const ConstTensorView& lent) const {
    return lent.data() - group_.heap->base();
  }

  // The same error on every rank.
  void check() const override;
  // In the device's memory: not 0 once a meeting of this rank has failed.
  const std::uint32_t* failed() const;

  const Device& device() const { return device_; }
  Communicator& comm() const { return comm_; }

 private:
  friend class PeerMeetings;

  Communicator& comm_;
  Device device_;
  PeerGroup group_;
  std::shared_ptr<GroupListener> listener_;
  int num_exceptions_ = std::uncaught_exceptions();
  TensorView words_;  // [2] i32: failed
  TensorView bases_;  // [ranks] i64
};

// A channel of its own for one object, whose ranks meet in the same order.
class PeerMeetings {
 public:
  // How often ranks have met already in channels that are made from now on. The number wraps in
  // long runs, and tests begin near that.
  static inline std::atomic<std::uint32_t> meetings_before = 0;

  // Collective: for records of so many words.
  PeerMeetings(std::shared_ptr<PeerMemory> memory, std::int64_t record_words);
  ~PeerMeetings();
  PeerMeetings(const PeerMeetings&) = delete;
  PeerMeetings& operator=(const PeerMeetings&) = delete;

  // Lends views of this rank's heap, default ones for none, and returns those of all ranks: a table
  // [lent.size(), ranks] in the device's memory, null for none and where the meeting fails. What
  // this rank was given to do before is then done, on every rank.
  TensorView lend(std::span<const TensorView> lent, std::uint32_t detail) const;
  // Everything is written.
  void finish(const TensorView& cleared, std::uint32_t detail) const;
  // Nobody is at what this rank has lent before.
  void close() const;
  // gathered [ranks, words + record] i64 becomes what every rank brings.
  void gather(Meeting meeting, std::span<const std::int64_t> words, const ConstTensorView& record,
              const TensorView& gathered) const;

  PeerMemory& memory() const { return *memory_; }
  void check() const { memory_->check(); }
  std::weak_ptr<const PeerCheck> memory_check() const { return memory_; }

 private:
  void meet(const Meet& args) const;

  std::shared_ptr<PeerMemory> memory_;
  TensorView mail_;  // in the heap
  std::vector<std::byte*> mail_of_ranks_;
  TensorView tables_;  // [ranks + 1] i64: the mail of all ranks; how often they have met
  PeerChannel channel_;
};

// The addresses of one lent view, as kernels take them.
inline std::byte* const* bases_of(const TensorView& table, std::int64_t lent) {
  return reinterpret_cast<std::byte* const*>(table.slice(lent, lent + 1).data());
}

}  // namespace switchyard
