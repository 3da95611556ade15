// SPDX-License-Identifier: Apache-2.0
// The point where the threads of a communicator meet. They publish offers to each other there, and
// learn of failures.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::threads {

class MeetingPoint;

// The data that a rank publishes to its peers at a meeting.
struct Offer {
  std::string_view operation;
  std::string detail;
  std::uint64_t sequence = 0;
  std::chrono::steady_clock::time_point arrived;  // set by meet()
  std::int64_t unit_bytes = 0;  // size of a row or of the payload; must be equal on all ranks
  const std::byte* data = nullptr;
  std::span<const std::int64_t> rows;
  std::vector<std::byte> copy;  // the payload, if it is small enough to copy
  std::vector<TensorView> views;
  std::array<std::int64_t, 2> words{};
  std::shared_ptr<MeetingPoint> child;  // set by the leader in split()
};

class MeetingPoint : public std::enable_shared_from_this<MeetingPoint> {
 public:
  using Clock = std::chrono::steady_clock;

  struct Failure {
    std::string reason;
    std::vector<int> ranks;  // −1 − r for rank r of the world, which is not in the group
  };

  MeetingPoint(int size, std::chrono::milliseconds timeout);
  // Makes the meeting point of a subgroup; members[i] is the parent's rank of rank i.
  MeetingPoint(const std::shared_ptr<MeetingPoint>& parent, std::vector<int> members);

  // Makes such a subgroup and registers it, so that it fails too when one of its members fails
  // here.
  std::shared_ptr<MeetingPoint> make_child(std::vector<int> members);

  int size() const { return static_cast<int>(ranks_.size()); }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // A rank fills in its own offer for a phase before it meets, and reads its peers' offers
  // afterwards. An offer stays valid until the phase after the next, so none is overwritten while a
  // peer reads it.
  Offer& offer(int rank, std::uint64_t phase) {
    return ranks_[static_cast<std::size_t>(rank)].offers[phase % 2];
  }

  // Blocks until every rank has reached this phase (phases count from 1). Throws CommunicationError
  // if that can no longer happen, or does not happen within the timeout.
  void meet(int rank, std::uint64_t phase);

  // While a rank is reading, its peers do not return from a failed meeting, so that the memory it
  // reads stays valid. Must be set before the meeting whose offers are read.
  void set_reading(int rank, bool reading);
  // Ends this rank's reading and waits until its peers have ended theirs, for at most one timeout.
  // A rank calls this before it reports an error and so returns its memory to the caller.
  void wait_for_readers(int rank);

  // Fails the meeting point: every rank that waits, now or later, throws with this reason. Only the
  // first call counts. `origin` is the rank that caused the error.
  void fail(int origin, Failure failure);
  // Announces that this rank will come to no further meeting.
  void leave(int rank);
  // Returns the rank that failed first, here or in a group split off from this one; −1 if none.
  int first_failed_rank() const { return first_failed_rank_.load(); }

 private:
  struct Child {
    std::weak_ptr<MeetingPoint> point;
    std::vector<int> members;
  };
  struct alignas(64) Rank {
    std::array<Offer, 2> offers;
    std::atomic<std::uint64_t> phase{0};
    std::atomic<bool> reading{false};
    std::atomic<bool> left{false};
  };

  bool spin(std::uint64_t phase) const;
  std::vector<int> absent_ranks(std::uint64_t phase, bool only_left) const;
  // Explains a timeout of a rank that arrived at `since`. An absent rank that waits in another
  // group is not at fault; those that it waits for there are.
  Failure explain_timeout(const std::vector<int>& absent, Clock::time_point since);
  // Follows who waits for whom, and collects the ranks at fault.
  struct Search {
    Clock::time_point since;
    std::set<const MeetingPoint*> seen;
    std::set<int> culprits;  // world ranks
  };
  // Adds the ranks that keep `world_rank` from arriving: itself if it waits nowhere, here or below.
  void find_culprits(int world_rank, Search& search);
  // Returns the point in which the rank waits, here or below, and its rank there; null if there is
  // none. A meeting that failed before `since` holds nobody up any more.
  std::pair<std::shared_ptr<MeetingPoint>, int> find_waiting(int world_rank,
                                                             Clock::time_point since);
  void note_first_failure(int origin);
  [[noreturn]] void throw_failure(int rank, std::uint64_t phase);

  std::vector<Rank> ranks_;
  std::chrono::milliseconds timeout_;
  std::weak_ptr<MeetingPoint> parent_;  // weak, since the parent's offers may hold this
  std::vector<int> members_;            // ranks in the parent; empty for a root
  std::vector<int> world_ranks_;        // ranks in the root

  std::atomic<std::uint64_t> arrivals_{0};
  std::atomic<std::uint64_t> completed_phase_{0};
  std::atomic<bool> failed_{false};
  std::atomic<int> first_failed_rank_{-1};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Failure> failure_;
  Clock::time_point failed_at_;
  std::vector<Child> children_;
};

}  // namespace switchyard::threads
