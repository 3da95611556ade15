// Where the threads of a communicator meet: their offers to each other, and what happens when one
// fails.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::threads {

class MeetingPoint;

// What a rank lays out for its peers when it comes to a meeting.
struct Offer {
  std::string_view operation;
  std::string detail;
  std::uint64_t sequence = 0;
  std::chrono::steady_clock::time_point arrived;  // set by meet()
  std::int64_t unit_bytes = 0;  // bytes of a row, or of the whole: must be equal on all ranks
  const std::byte* data = nullptr;
  std::span<const std::int64_t> rows;
  std::vector<std::byte> copy;  // a payload small enough to be held here
  std::vector<TensorView> views;
  std::array<std::int64_t, 2> words{};
  std::shared_ptr<MeetingPoint> child;  // of split()
};

class MeetingPoint : public std::enable_shared_from_this<MeetingPoint> {
 public:
  struct Failure {
    std::string reason;
    std::vector<int> ranks;
  };

  MeetingPoint(int size, std::chrono::milliseconds timeout);
  // Of some of parent's ranks: members[i] is the parent's rank of rank i.
  MeetingPoint(const std::shared_ptr<MeetingPoint>& parent, std::vector<int> members);

  // As the constructor, and a failure of one of the members here is one there too.
  std::shared_ptr<MeetingPoint> make_child(std::vector<int> members);

  int size() const { return static_cast<int>(ranks_.size()); }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // A rank fills its own offer for a phase before it meets; afterwards it reads its peers'. An
  // offer stands until the phase after the next, so nobody overwrites what is still being read.
  Offer& offer(int rank, std::uint64_t phase) {
    return ranks_[static_cast<std::size_t>(rank)].offers[phase % 2];
  }

  // Blocks until every rank has come to this phase (phases count from 1). Throws
  // CommunicationError when that cannot happen any more, or not within the timeout.
  void meet(int rank, std::uint64_t phase);

  // While a rank is reading, its peers do not return from a failed meeting, so that the memory it
  // reads stays valid. Set before the meeting whose offers are read.
  void set_reading(int rank, bool reading);
  // Ends this rank's reading and waits until its peers have ended theirs: what a rank does before
  // an error hands its memory back to the caller.
  void wait_for_readers(int rank);

  // Ends it: every rank that waits, now or later, throws with this reason. The first call
  // counts. `origin` is the rank whose error it is.
  void fail(int origin, Failure failure);
  // This rank will come to no further meeting.
  void leave(int rank);
  // The rank whose failure came first, here or where ranks split off from these meet; −1 if none.
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
  void note_first_failure(int origin);
  [[noreturn]] void throw_failure(int rank, std::uint64_t phase);

  std::vector<Rank> ranks_;
  std::chrono::milliseconds timeout_;
  std::weak_ptr<MeetingPoint> parent_;  // whose offers may still hold this
  std::vector<int> members_;            // parent's ranks; empty for a root

  std::atomic<std::uint64_t> arrivals_{0};
  std::atomic<std::uint64_t> completed_phase_{0};
  std::atomic<bool> failed_{false};
  std::atomic<int> first_failed_rank_{-1};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Failure> failure_;
  std::vector<Child> children_;
};

}  // namespace switchyard::threads
