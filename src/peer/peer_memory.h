// SPDX-License-Identifier: Apache-2.0
// Memory through which the ranks of a group pass tokens to each other without their hosts: how it
// is set up, how ranks meet in it, and how failures are handled.
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

// One rank's part of the peer memory. Ranks are threads of one process or processes of one host,
// each with its own device. The communicator sets the memory up and reports failures.
//
// A failure is permanent: every later call throws. The heaps, which a late rank may still write to,
// are freed once all ranks have let go of them.
class PeerMemory final : public PeerCheck {
 public:
  // Collective. Returns the group's existing memory for these devices, or creates it. Throws
  // Unsupported on every rank if some ranks cannot reach each other's memory: they are on different
  // hosts, or their GPUs are not peers.
  static std::shared_ptr<PeerMemory> of(Communicator& comm, const Device& device);

  PeerMemory(Communicator& comm, Device device, PeerGroup group,
             std::shared_ptr<GroupListener> listener);
  ~PeerMemory() override;

  // Takes a tensor from this rank's heap. Peers may still be accessing the block's previous
  // contents, so it must not be written before the next meeting.
  TensorView take(const Shape& shape, Dtype dtype) const;
  bool holds(const ConstTensorView& view) const { return group_.heap->holds(view); }
  std::int64_t offset_of(const ConstTensorView& lent) const {
    return lent.data() - group_.heap->base();
  }

  // Throws the same error on every rank if the group has failed.
  void check() const override;
  // A flag in the device's memory: nonzero once a meeting of this rank has failed.
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
  TensorView words_;  // [2] i32; the first is the failed flag
  TensorView bases_;  // [ranks] i64: heap base addresses
};

// A channel for the meetings of one object. All ranks must meet in the same order.
class PeerMeetings {
 public:
  // The initial meeting number of channels created from now on. The number wraps around in long
  // runs; tests start close to that.
  static inline std::atomic<std::uint32_t> meetings_before = 0;

  // Collective. `record_words` is the size of the records that gather() exchanges.
  PeerMeetings(std::shared_ptr<PeerMemory> memory, std::int64_t record_words);
  ~PeerMeetings();
  PeerMeetings(const PeerMeetings&) = delete;
  PeerMeetings& operator=(const PeerMeetings&) = delete;

  // Lends views of this rank's heap (default views lend nothing) and returns the addresses of all
  // ranks' views: a table [lent.size(), ranks] in the device's memory, with nulls where nothing is
  // lent or the meeting failed. After the meeting, all earlier work of every rank's device is done.
  TensorView lend(std::span<const TensorView> lent, std::uint32_t detail) const;
  // Meets after the ranks have written to lent memory: afterwards all their writes are visible.
  // `cleared` becomes zero if the meeting fails.
  void finish(const TensorView& cleared, std::uint32_t detail) const;
  // Meets so that no peer still accesses what this rank has lent before.
  void close() const;
  // Fills gathered [ranks, words + record] i64 with the words and records of all ranks.
  void gather(Meeting meeting, std::span<const std::int64_t> words, const ConstTensorView& record,
              const TensorView& gathered) const;

  PeerMemory& memory() const { return *memory_; }
  void check() const { memory_->check(); }
  std::weak_ptr<const PeerCheck> memory_check() const { return memory_; }

 private:
  void meet(const Meet& args) const;

  std::shared_ptr<PeerMemory> memory_;
  TensorView mail_;  // lives in the heap
  std::vector<std::byte*> mail_of_ranks_;
  // [ranks + 1] i64: the mail addresses of all ranks, then the number of meetings so far.
  TensorView tables_;
  PeerChannel channel_;
};

// Returns the addresses of one lent view on all ranks, as kernels take them.
inline std::byte* const* bases_of(const TensorView& table, std::int64_t lent) {
  return reinterpret_cast<std::byte* const*>(table.slice(lent, lent + 1).data());
}

}  // namespace switchyard
