// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, whose collectives copy from each other's memory.
#pragma once

#include <memory>

#include "comm/threads/meeting_point.h"
#include "switchyard/communicator.h"

namespace switchyard::threads {

class ThreadCommunicator final : public Communicator, public MappedBuffers {
 public:
  ThreadCommunicator(std::shared_ptr<MeetingPoint> point, int rank);
  ~ThreadCommunicator() override;

  std::string_view backend() const override { return "threads"; }
  MappedBuffers* mapped_buffers() override { return this; }
  std::vector<std::vector<TensorView>> map(std::span<const TensorView> views) override;
  void phase_barrier() override;

 private:
  void do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) override;
  void do_all_gather(const Bytes& send, const Bytes& recv) override;
  void do_broadcast(const Bytes& values, int root) override;
  void do_barrier() override;
  std::unique_ptr<Communicator> do_split(int color, int key) override;
  void do_abort(const std::string& reason, const std::vector<int>& culprits) override;

  // Starts the next phase and returns this rank's offer for it, cleared.
  Offer& prepare(std::int64_t unit_bytes);
  const Offer& offer_of(int rank) { return point_->offer(rank, phase_); }
  void meet();
  // Meets, lets `read` access the peers' memory, and meets again once all are done with it.
  template <typename Read>
  void meet_and_read(Read read);
  void require_same_call();
  void add_waits();
  [[noreturn]] void blame(int rank, const std::string& what) const;

  std::shared_ptr<MeetingPoint> point_;
  std::uint64_t phase_ = 0;
};

}  // namespace switchyard::threads
